// A session of a client: what it holds is kept, and only what is new is computed. See "Sessions" in docs/wire.md.
import { UsageError } from "./errors.js";
import { Stream } from "./stream.js";

export class Session {
  #connection;
  #epoch;
  #number;

  constructor(connection, number, epoch) {
    this.#connection = connection;
    this.#number = number;
    this.#epoch = epoch;
  }

  get number() {
    return this.#number;
  }

  generate(request = {}, options = {}) {
    this.#connection.require(this.#epoch);
    return new Stream(this.#connection, { ...request, session: this.#number }, options);
  }

  async complete(request, options) {
    return this.generate(request, options).result();
  }

  /** Reads a prompt ahead of the request that needs it; resolves to the tokens that the session then holds. */
  async append(request) {
    const result = await this.complete({ ...request, max_tokens: 0 });
    return result.usage.prompt_tokens;
  }

  /** Another session that holds the same. */
  async fork() {
    this.#connection.require(this.#epoch);
    const to = this.#connection.newSession();
    await this.#change("fork", { to });
    return new Session(this.#connection, to, this.#epoch);
  }

  /** Takes the last tokens off it; resolves to the tokens that it then holds, as the two below. */
  async rollback(tokens) {
    return this.#change("rollback", { tokens });
  }

  /** Keeps so many `tokens`, or so many `characters`, of the last answer, which then is its end. */
  async truncate({ tokens, characters } = {}) {
    if ((tokens === undefined) === (characters === undefined)) throw new UsageError("give tokens or characters");
    return this.#change("truncate", { tokens, characters });
  }

  async close() {
    return this.#change("close_session", {});
  }

  async [Symbol.asyncDispose ?? Symbol.for("Symbol.asyncDispose")]() {
    if (this.#connection.isLive(this.#epoch)) await this.close();
  }

  async #change(type, fields) {
    this.#connection.require(this.#epoch);
    const answer = await this.#connection.longQuestion(type, { ...fields, session: this.#number }, "session");
    return answer.tokens;
  }
}
