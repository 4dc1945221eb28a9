// A completion under way.
import { FailedError, ProtocolError, UsageError } from "./errors.js";

// Streams that nobody holds any more, of requests that have not ended.
const abandoned = new FinalizationRegistry(({ connection, id, epoch }) => {
  if (!connection.isLive(epoch)) return;
  connection.tell("cancel", id);
  connection.forget(id);
});

export class Stream {
  #connection;
  #request = null; // { id, inbox }; null once it has ended
  #id;
  #epoch;
  #result = { text: "", token_ids: [], logprobs: null, prompt_logprobs: null, prompt_top_logprobs: null };
  #ended = false;
  #error = null;
  #signal;
  #onAbort = null;

  constructor(connection, fields, { signal } = {}) {
    this.#connection = connection;
    this.#signal = signal;
    if (signal?.aborted) {
      this.#error = signal.reason;
      return;
    }
    this.#request = connection.ask("generate", fields);
    if (fields?.prompt_logprobs) this.#result.prompt_logprobs = [null]; // the first token has none
    if (fields?.prompt_top_logprobs) this.#result.prompt_top_logprobs = [null];
    this.#id = this.#request.id;
    this.#epoch = connection.epoch;
    abandoned.register(this, { connection, id: this.#id, epoch: this.#epoch }, this.#request);
    if (signal !== undefined) {
      this.#onAbort = () => this.#abort(signal.reason);
      signal.addEventListener("abort", this.#onAbort, { once: true });
    }
  }

  /** The next tokens; null once it has ended. */
  async next() {
    for (;;) {
      if (this.#error !== null) throw this.#error;
      if (this.#request === null) return null;
      let message;
      try {
        message = await this.#connection.next(this.#request);
      } catch (error) {
        throw error instanceof UsageError ? error : this.#fail(error);
      }
      if (message.type === "token") return this.#add(message);
      if (message.type === "prompt_logprobs") this.#addPrompt(message);
      else if (message.type === "done") this.#finish(message);
      else if (message.type !== "ack") throw this.#fail(this.#broken(`goes on with a message of type ${message.type}`));
    }
  }

  /** Has the daemon end it within one round: tokens on their way still come, then its end, "cancelled". */
  cancel() {
    if (this.#request !== null && this.#connection.isLive(this.#epoch)) this.#connection.tell("cancel", this.#id);
  }

  /** Releases the answer of a request with `hold`. Rejects with RefusedError ("not_held") where nothing is held. */
  async commit() {
    this.#connection.require(this.#epoch);
    await this.#connection.question("commit", { request: this.#id }, "ack");
  }

  /** What came, once it has ended: reads what is left first. */
  async result() {
    while ((await this.next()) !== null);
    if (!this.#ended) throw new UsageError("a stream that was left before its end has no result");
    return this.#result;
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (let tokens = await this.next(); tokens !== null; tokens = await this.next()) yield tokens;
    } finally {
      this.#leave();
    }
  }

  #add(message) {
    const { index, ids, text, time_ns, logprobs = null } = message;
    if (!Array.isArray(ids) || typeof text !== "string" || typeof index !== "number") {
      throw this.#fail(this.#broken("has a token message without ids and text"));
    }
    for (const id of ids) this.#result.token_ids.push(id);
    this.#result.text += text;
    if (logprobs !== null) (this.#result.logprobs ??= []).push(...logprobs);
    return { index, ids, text, time_ns, logprobs };
  }

  /** What is said of the prompt's tokens, before any of the answer's. */
  #addPrompt(message) {
    const found = (this.#result.prompt_logprobs ??= [null]);
    const { index, logprobs, top = null } = message;
    const whole = top === null || (Array.isArray(top) && top.length === logprobs?.length);
    if (!Array.isArray(logprobs) || index !== found.length || !whole) {
      throw this.#fail(this.#broken("has log-probabilities of its prompt that do not go on from those before"));
    }
    for (const logprob of logprobs) found.push(logprob);
    if (top !== null) for (const likeliest of top) (this.#result.prompt_top_logprobs ??= [null]).push(likeliest);
  }

  #finish(message) {
    const { type: _type, id: _id, ...done } = message;
    if (typeof done.finish_reason !== "string" || typeof done.usage !== "object") {
      throw this.#fail(this.#broken("ends without a reason and usage"));
    }
    Object.assign(this.#result, done);
    this.#ended = true;
    this.#close();
    if (done.error) {
      this.#error = new FailedError(done.error, this.#result);
      throw this.#error;
    }
  }

  #broken(what) {
    const error = this.#connection.broken(`a completion ${what}`);
    return error instanceof ProtocolError ? error : new ProtocolError(what);
  }

  #fail(error) {
    this.#error ??= error;
    this.#close();
    return this.#error;
  }

  #abort(reason) {
    const request = this.#request;
    this.#error ??= reason;
    this.#leave();
    request?.inbox.abort(reason);
  }

  /** Cancels what has not ended, and throws away what still comes. */
  #leave() {
    if (this.#request === null) return;
    this.cancel();
    this.#close();
  }

  #close() {
    if (this.#request !== null) {
      abandoned.unregister(this.#request);
      if (this.#connection.isLive(this.#epoch)) this.#connection.forget(this.#id);
    }
    this.#request = null;
    if (this.#onAbort !== null) this.#signal.removeEventListener("abort", this.#onAbort);
    this.#onAbort = null;
  }
}
