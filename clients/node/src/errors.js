// What can go wrong: every error is an UllError whose `code` is one of docs/wire.md, or one of the client's own.

export class UllError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = new.target.name;
    this.code = code;
  }
}

/** The daemon refused a request: nothing of it has run. */
export class RefusedError extends UllError {
  constructor(message) {
    super(message.code, message.message);
    this.field = message.field ?? null; // the field at fault
    this.retryAfterMs = message.retry_after_ms ?? null; // of "busy": when it may be worth while to try again
    this.queueLength = message.queue_length ?? null; // of "busy": requests that wait
    this.expectedMs = message.expected_ms ?? null; // of "deadline_unreachable": when the last token would be there
  }
}

/** A request that was accepted has failed (`done.error`). `result` has what came before. */
export class FailedError extends UllError {
  constructor(error, result) {
    super(error.code, error.message);
    this.result = result;
  }
}

/** There is no daemon, it has gone, or it does not answer. Streams and sessions are lost; the next call connects again. */
export class DisconnectedError extends UllError {
  constructor(message, options) {
    super("disconnected", message, options);
  }
}

/** A message of the daemon is none that docs/wire.md has. The connection is given up. */
export class ProtocolError extends UllError {
  constructor(message, options) {
    super("protocol", message, options);
  }
}

/** A call that makes no sense. */
export class UsageError extends UllError {
  constructor(message, options) {
    super("usage", message, options);
  }
}
