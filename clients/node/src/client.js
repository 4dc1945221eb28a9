// What programs use: requests to a daemon, and questions.
import { lstatSync } from "node:fs";
import { isAbsolute, join } from "node:path";

import { Connection } from "./connection.js";
import { UsageError } from "./errors.js";
import { Session } from "./session.js";
import { Stream } from "./stream.js";

const TRANSPORTS = ["auto", "local", "zeromq"];

/**
 * Where daemon and clients of one user meet where nothing is configured: in a directory that is this user's own. Throws
 * UsageError where there is none.
 */
export function defaultUrl() {
  const user = process.geteuid();
  for (const directory of [process.env.XDG_RUNTIME_DIR ?? "", `/run/user/${user}`, `/tmp/ull-${user}`]) {
    if (!isAbsolute(directory)) continue;
    const found = lstatSync(directory, { throwIfNoEntry: false });
    if (found?.isDirectory() && found.uid === user && (found.mode & 0o022) === 0) {
      return `ipc://${join(directory, "ull.sock")}`;
    }
  }
  throw new UsageError("no directory of the user's own has a default socket: name the daemon's endpoint");
}

export class Client {
  #connection;

  constructor(url = defaultUrl(), options = {}) {
    const { transport = "auto", connectTimeout = 5000, silenceTimeout = 10000, keys } = options;
    if (typeof url !== "string") throw new UsageError("url must be a text, such as ipc:///run/ull/ull.sock");
    if (!TRANSPORTS.includes(transport)) throw new UsageError(`transport must be one of ${TRANSPORTS.join(", ")}`);
    for (const [name, value] of Object.entries({ connectTimeout, silenceTimeout })) {
      if (!(value > 0 && value < 2 ** 31)) throw new UsageError(`${name} must be a number of milliseconds`);
    }
    this.#connection = new Connection(url, { transport, connectTimeout, silenceTimeout, keys });
  }

  /** Begins a completion; `request` has the fields of `generate` in docs/wire.md by their names. */
  generate(request, options = {}) {
    return new Stream(this.#connection, request, options);
  }

  async complete(request, options) {
    return this.generate(request, options).result();
  }

  async openSession({ pin = false } = {}) {
    const epoch = this.#connection.epoch;
    const session = this.#connection.newSession();
    await this.#connection.question("open_session", { session, pin }, "session");
    return new Session(this.#connection, session, epoch);
  }

  /** The ids that a request of the same `prompt` or `messages` would use. */
  async tokenize(request) {
    return (await this.#connection.longQuestion("tokenize", request, "tokenize")).token_ids;
  }

  async countTokens(request) {
    return (await this.#connection.longQuestion("tokenize", { ...request, count_only: true }, "tokenize")).count;
  }

  /** The text that a stream of these ids would give. */
  async detokenize(ids) {
    return (await this.#connection.longQuestion("detokenize", { token_ids: ids }, "detokenize")).text;
  }

  async health() {
    return this.#connection.question("health");
  }

  async info() {
    return this.#connection.question("info");
  }

  async stats() {
    return this.#connection.question("stats");
  }

  /** Ends the connection, and with it every request and session. */
  close() {
    this.#connection.close();
  }

  [Symbol.dispose ?? Symbol.for("Symbol.dispose")]() {
    this.close();
  }
}
