// The daemon's local socket beside an ipc endpoint; see "Local" in docs/wire.md.
import { connect } from "node:net";

import { DisconnectedError, ProtocolError } from "./errors.js";
import { MAX_MESSAGE_BYTES } from "./messages.js";

const HELLO = Buffer.from("ull1\0\0\0\0", "latin1");
const HELLO_TIMEOUT_MS = 1000;

/** Connects to a unix socket at `path`. Resolves to null where no daemon answers there. */
export function connectLocal(path, onMessage, onLost) {
  return new Promise((resolve) => {
    const socket = connect({ path });
    const timer = setTimeout(() => fail(), HELLO_TIMEOUT_MS);
    let received = Buffer.alloc(0);
    const fail = () => {
      clearTimeout(timer);
      socket.destroy();
      resolve(null);
    };
    socket.on("error", fail);
    socket.on("close", fail);
    socket.on("connect", () => socket.write(HELLO));
    socket.on("data", (bytes) => {
      received = Buffer.concat([received, bytes]);
      if (received.length < HELLO.length) return;
      if (!received.subarray(0, HELLO.length).equals(HELLO)) {
        fail();
        return;
      }
      clearTimeout(timer);
      socket.removeAllListeners();
      const transport = new LocalTransport(socket, path, onMessage, onLost);
      transport.take(received.subarray(HELLO.length));
      resolve(transport);
    });
  });
}

class LocalTransport {
  #socket;
  #onMessage;
  #onLost;
  #parts = []; // of what has come of a message
  #length = 0; // of these, in bytes

  constructor(socket, path, onMessage, onLost) {
    this.#socket = socket;
    this.#onMessage = onMessage;
    this.#onLost = onLost;
    const gone = (why) => this.#lose(new DisconnectedError(`the daemon at ${path}: ${why}`));
    socket.on("data", (bytes) => this.take(bytes));
    socket.on("error", (error) => gone(error.message));
    socket.on("close", () => gone("has closed the connection"));
  }

  send(payload) {
    const frame = Buffer.allocUnsafe(4 + payload.length);
    frame.writeUInt32LE(payload.length);
    frame.set(payload, 4);
    this.#socket.write(frame);
  }

  /** Whether the program goes on as long as this connection is open. */
  keepAlive(wanted) {
    if (wanted) this.#socket.ref();
    else this.#socket.unref();
  }

  close() {
    this.#onLost = () => {};
    this.#onMessage = () => {};
    this.#socket.removeAllListeners("data");
    this.#socket.destroy();
  }

  /** Cuts what has come into messages. */
  take(bytes) {
    this.#parts.push(bytes);
    this.#length += bytes.length;
    while (this.#length >= 4) {
      if (this.#parts[0].length < 4) this.#join();
      const size = this.#parts[0].readUInt32LE();
      if (size > MAX_MESSAGE_BYTES) {
        this.#lose(new ProtocolError(`the daemon announces a message of ${size} bytes`));
        return;
      }
      if (this.#length < 4 + size) return;
      this.#join();
      const whole = this.#parts[0];
      const rest = whole.subarray(4 + size);
      this.#parts = rest.length > 0 ? [rest] : [];
      this.#length = rest.length;
      this.#onMessage(whole.subarray(4, 4 + size));
    }
  }

  #join() {
    if (this.#parts.length > 1) this.#parts = [Buffer.concat(this.#parts, this.#length)];
  }

  #lose(error) {
    const tell = this.#onLost;
    this.close();
    tell(error);
  }
}
