// A DEALER of the package `zeromq`; see "ZeroMQ" in docs/wire.md.
import { DisconnectedError, ProtocolError, UsageError } from "./errors.js";
import { MAX_MESSAGE_BYTES } from "./messages.js";

const VERSION = "ull1";
const NEVER = 2 ** 30; // milliseconds; with -1 libzmq drops what a lost connection has brought and nobody has read yet

/**
 * Connects to `url` within so many milliseconds, with `keys` if the daemon asks for them. Rejects with DisconnectedError
 * where nothing answers.
 */
export async function connectZeromq(url, keys, timeoutMs, onMessage, onLost) {
  let zeromq;
  try {
    zeromq = await import("zeromq");
  } catch (error) {
    throw new UsageError(`${url} needs the package zeromq: npm install zeromq`, { cause: error });
  }
  const socket = new zeromq.Dealer({
    linger: 0,
    reconnectInterval: NEVER,
    ipv6: true,
    maxMessageSize: MAX_MESSAGE_BYTES,
    heartbeatInterval: 1000,
    heartbeatTimeout: 5000,
    sendTimeout: timeoutMs,
  });
  if (keys !== undefined) {
    try {
      socket.curveServerKey = keys.server;
      socket.curvePublicKey = keys.public;
      socket.curveSecretKey = keys.secret;
    } catch (error) {
      socket.close();
      throw new UsageError("keys: server, public and secret of a key file, 40 characters each", { cause: error });
    }
  }
  const gone = (why) => new DisconnectedError(`the daemon at ${url}: ${why}`);
  let timer;
  try {
    await new Promise((resolve, reject) => {
      timer = setTimeout(() => reject(gone("nothing answers there")), timeoutMs);
      socket.events.on("handshake", resolve);
      socket.events.on("connect:retry", () => reject(gone("nothing answers there")));
      try {
        socket.connect(url);
      } catch (error) {
        reject(gone(error.message));
      }
    });
  } catch (error) {
    socket.close();
    throw error;
  } finally {
    clearTimeout(timer);
  }
  return new ZeromqTransport(socket, url, onMessage, onLost);
}

// libzmq would connect again by itself, and the daemon know nothing of what was asked before: this transport ends with
// its connection.
class ZeromqTransport {
  #socket;
  #onLost;
  #closed = false;

  constructor(socket, url, onMessage, onLost) {
    this.#socket = socket;
    this.#onLost = onLost;
    const gone = (why) => this.#lose(new DisconnectedError(`the daemon at ${url}: ${why}`));
    // This news overtakes what came before the hang-up, which is still to be read.
    const ended = () => {
      if (!this.#closed && socket.readable) setImmediate(ended);
      else gone("has closed the connection");
    };
    socket.events.on("disconnect", ended);
    this.#read(onMessage).catch((error) => {
      if (error instanceof ProtocolError) this.#lose(error);
      else gone(error.message);
    });
  }

  async send(payload) {
    await this.#socket.send([VERSION, payload]);
  }

  /** libzmq's threads keep a program alive until the client is closed. */
  keepAlive() {}

  close() {
    if (this.#closed) return;
    this.#closed = true;
    this.#socket.close();
  }

  async #read(onMessage) {
    for await (const frames of this.#socket) {
      if (this.#closed) return;
      if (frames.length !== 2 || frames[0].toString("latin1") !== VERSION) {
        throw new ProtocolError("a message of the daemon is not of two frames, the first of which is ull1");
      }
      onMessage(frames[1]);
    }
  }

  #lose(error) {
    if (this.#closed) return;
    this.close();
    this.#onLost(error);
  }
}
