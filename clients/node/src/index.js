// A client of ulld for Node.js; README.md says how to use it, index.d.ts has the types.
export { Client, defaultUrl } from "./client.js";
export { DisconnectedError, FailedError, ProtocolError, RefusedError, UllError, UsageError } from "./errors.js";
export { Session } from "./session.js";
export { Stream } from "./stream.js";
