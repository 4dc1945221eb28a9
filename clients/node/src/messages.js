// Messages as msgpack. Integers are numbers, and BigInts above 2^53, which a number would not hold.
import { decode, encode } from "@msgpack/msgpack";

import { ProtocolError, UsageError } from "./errors.js";

export const MAX_MESSAGE_BYTES = 16 * 1024 * 1024; // of one message, either way

const LIMITS = {
  useBigInt64: true,
  maxStrLength: MAX_MESSAGE_BYTES,
  maxBinLength: MAX_MESSAGE_BYTES,
  maxArrayLength: 1 << 20,
  maxMapLength: 1 << 16,
  maxExtLength: 0,
};
const MAX_DEPTH = 64;

/** The bytes of a message; fields that are undefined are left out. Throws UsageError for what msgpack cannot hold. */
export function pack(message) {
  try {
    return encode(message, { useBigInt64: true, ignoreUndefined: true });
  } catch (error) {
    throw new UsageError(`a request cannot be sent: ${error.message}`, { cause: error });
  }
}

/** The message of these bytes. Throws ProtocolError where they are none with a type and an id. */
export function unpack(bytes) {
  let message;
  try {
    message = narrow(decode(bytes, LIMITS), 0);
  } catch (error) {
    throw new ProtocolError(`a message of the daemon is no msgpack: ${error.message}`, { cause: error });
  }
  if (message === null || typeof message !== "object" || Array.isArray(message) || typeof message.type !== "string") {
    throw new ProtocolError("a message of the daemon has no type");
  }
  if (message.id === null && message.type === "error") {
    throw new ProtocolError(`the daemon did not understand a message: ${message.message}`);
  }
  if (typeof message.id !== "number") throw new ProtocolError("a message of the daemon has no id");
  return message;
}

/** A decoded value, in place, whose big integers are numbers where these hold them. */
function narrow(value, depth) {
  if (typeof value === "bigint") {
    return value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
  }
  if (value === null || typeof value !== "object") return value;
  if (depth === MAX_DEPTH) throw new RangeError(`it is deeper than ${MAX_DEPTH} levels`);
  for (const key of Object.keys(value)) value[key] = narrow(value[key], depth + 1);
  return value;
}
