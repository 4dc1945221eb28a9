// One client's connection: sends messages in order, and sorts what comes by the request that it belongs to.
import { DisconnectedError, ProtocolError, RefusedError, UsageError } from "./errors.js";
import { connectLocal } from "./local.js";
import { pack, unpack } from "./messages.js";
import { connectZeromq } from "./zeromq.js";

const IPC = "ipc://";

/** What has come for one request, and who waits for it. */
class Inbox {
  #messages = [];
  #error = null;
  #waiter = null;

  get isEmpty() {
    return this.#messages.length === 0;
  }

  put(message) {
    this.#messages.push(message);
    this.#wake();
  }

  /** What came before is still read; then this is thrown. */
  fail(error) {
    this.#error ??= error;
    this.#wake();
  }

  /** What came before is thrown away. */
  abort(error) {
    this.#messages = [];
    this.fail(error);
  }

  /** The next message; null where none has come for so many milliseconds. */
  async next(timeoutMs) {
    if (this.#waiter !== null) throw new UsageError("one reads a request at a time");
    if (this.isEmpty && this.#error === null) {
      await new Promise((resolve) => {
        const timer = setTimeout(() => this.#wake(), timeoutMs);
        this.#waiter = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    if (!this.isEmpty) return this.#messages.shift();
    if (this.#error !== null) throw this.#error;
    return null;
  }

  #wake() {
    const waiter = this.#waiter;
    this.#waiter = null;
    waiter?.();
  }
}

export class Connection {
  #url;
  #options;
  #transport = null;
  #outgoing = [];
  #sending = false;
  #inboxes = new Map();
  #lastId = 0;
  #lastSession = 0;
  #closed = false;
  #epoch = 0; // which connection this is: another one knows nothing of what was asked of this one

  constructor(url, options) {
    this.#url = url;
    this.#options = options;
  }

  get epoch() {
    return this.#epoch;
  }

  isLive(epoch) {
    return !this.#closed && epoch === this.#epoch;
  }

  require(epoch) {
    if (!this.isLive(epoch)) throw new DisconnectedError("the connection of this request or session has ended");
  }

  newSession() {
    this.#lastSession += 1;
    return this.#lastSession;
  }

  /** Sends a message under an id of its own: `{ id, inbox }`. */
  ask(type, fields) {
    if (this.#closed) throw new UsageError("the client is closed");
    const id = this.#lastId + 1;
    // The id goes first: the daemon looks for it at the beginning of a message that is too long.
    const payload = pack(Object.assign({ id, type }, fields, { id, type }));
    this.#lastId = id;
    const inbox = new Inbox();
    this.#inboxes.set(id, inbox);
    this.#transport?.keepAlive(true);
    this.#send(payload);
    return { id, inbox };
  }

  /** A message about request `of`, whose id it bears: nothing waits for its answer. */
  tell(type, of) {
    if (!this.#closed) this.#send(pack({ id: of, type }));
  }

  /** Messages for this request are thrown away from now on. */
  forget(id) {
    this.#inboxes.delete(id);
    if (this.#inboxes.size === 0) this.#transport?.keepAlive(false);
  }

  /** The next message for a request. Asks after it where there is nothing for a while. Rejects for `error`. */
  async next({ id, inbox }) {
    for (;;) {
      const message = await inbox.next(this.#options.silenceTimeout);
      if (message !== null) return this.#checked(message);
      const health = await this.question("health", { request: id });
      if (health.live === false && inbox.isEmpty) {
        this.#lose(new DisconnectedError(`the daemon at ${this.#url} knows nothing of a request that has not ended`));
      }
    }
  }

  /** The one answer to a question. */
  async question(type, fields = {}, answer = type) {
    return this.#answer(this.ask(type, fields), answer, false);
  }

  /** The same for a question that waits for others: the daemon is asked after a while whether it is alive. */
  async longQuestion(type, fields, answer) {
    return this.#answer(this.ask(type, fields), answer, true);
  }

  /** Gives the connection up for a message that makes no sense, and returns the error. */
  broken(message) {
    const error = new ProtocolError(message);
    this.#lose(error);
    return error;
  }

  close() {
    this.#closed = true;
    this.#lose(new DisconnectedError("the client was closed"));
  }

  async #answer({ id, inbox }, type, patient) {
    try {
      let message = await inbox.next(this.#options.silenceTimeout);
      while (message === null && patient) {
        await this.question("health");
        message = await inbox.next(this.#options.silenceTimeout);
      }
      if (message === null) {
        const error = new DisconnectedError(`the daemon at ${this.#url} does not answer`);
        this.#lose(error);
        throw error;
      }
      if (this.#checked(message).type !== type) throw this.broken(`an answer is of type ${message.type}, not ${type}`);
      return message;
    } finally {
      this.forget(id);
    }
  }

  /** The message, unless it is an `error`. */
  #checked(message) {
    if (message.type !== "error") return message;
    if (typeof message.code !== "string" || typeof message.message !== "string") {
      throw this.broken("an error of the daemon has no code");
    }
    throw new RefusedError(message);
  }

  #send(payload) {
    this.#outgoing.push(payload);
    if (!this.#sending) this.#pump();
  }

  async #pump() {
    this.#sending = true;
    const epoch = this.#epoch;
    try {
      if (this.#transport === null) await this.#open();
      while (this.#outgoing.length > 0 && epoch === this.#epoch) {
        const sent = this.#transport.send(this.#outgoing.shift());
        if (sent !== undefined) await sent;
      }
    } catch (error) {
      const known = error instanceof DisconnectedError || error instanceof UsageError || error instanceof ProtocolError;
      if (epoch === this.#epoch) {
        this.#lose(known ? error : new DisconnectedError(`the daemon at ${this.#url}: ${error.message}`));
      }
    } finally {
      this.#sending = false;
    }
    if (this.#outgoing.length > 0) this.#pump();
  }

  async #open() {
    const epoch = this.#epoch;
    const { transport: kind, connectTimeout, keys } = this.#options;
    const onMessage = (bytes) => {
      if (epoch === this.#epoch) this.#sort(bytes);
    };
    const onLost = (error) => {
      if (epoch === this.#epoch) this.#lose(error);
    };
    const isIpc = this.#url.startsWith(IPC);
    let transport = null;
    if (kind === "local" && !isIpc) throw new UsageError("the local transport is for ipc:// only");
    if (isIpc && kind !== "zeromq") {
      transport = await connectLocal(`${this.#url.slice(IPC.length)}.local`, onMessage, onLost);
      if (transport === null && kind === "local") throw new DisconnectedError(`no daemon answers at ${this.#url}.local`);
    }
    transport ??= await connectZeromq(this.#url, isIpc ? undefined : keys, connectTimeout, onMessage, onLost);
    if (epoch !== this.#epoch) {
      transport.close();
      throw new DisconnectedError("the client was closed");
    }
    this.#transport = transport;
    transport.keepAlive(this.#inboxes.size > 0);
  }

  #sort(bytes) {
    try {
      const message = unpack(bytes);
      this.#inboxes.get(message.id)?.put(message);
    } catch (error) {
      this.#lose(error);
    }
  }

  #lose(error) {
    this.#epoch += 1;
    this.#transport?.close();
    this.#transport = null;
    this.#outgoing = [];
    const inboxes = [...this.#inboxes.values()];
    this.#inboxes.clear();
    for (const inbox of inboxes) inbox.fail(error);
  }
}

