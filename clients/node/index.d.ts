/** An integer: a number, or a BigInt above 2^53, where a number would not be exact. */
export type Integer = number | bigint;

export interface ChatMessage {
  role: string;
  content?: string | { type: "text"; text: string }[] | null;
  [field: string]: unknown;
}

/** The fields of `generate` in docs/wire.md, by their names; those that are left out have the daemon's default. */
export interface Request {
  prompt?: string | null;
  messages?: ChatMessage[] | null;
  token_ids?: number[] | null;
  tools?: object[] | null;
  tool_choice?: string | object | null;
  documents?: object[] | null;
  chat_template_kwargs?: object | null;
  add_generation_prompt?: boolean | null;
  continue_final_message?: boolean | null;
  special_tokens?: boolean | null;
  max_tokens?: number | null;
  temperature?: number | null;
  top_k?: number | null;
  top_p?: number | null;
  min_p?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  repetition_penalty?: number | null;
  seed?: Integer | null;
  stop?: string | string[] | null;
  stop_ids?: number | number[] | null;
  logit_bias?: Record<number, number> | null;
  logprobs?: number | null;
  prompt_logprobs?: boolean | null;
  prompt_top_logprobs?: number | null;
  choices?: string[] | null;
  json_schema?: object | boolean | null;
  regex?: string | null;
  lark?: string | null;
  json_object?: boolean | null;
  ignore_eos?: boolean | null;
  timeout_ms?: number | null;
  deadline_ms?: number | null;
  priority?: "realtime" | "interactive" | "batch" | null;
  hold?: boolean | null;
  speculate?: string | null;
  max_tree?: number | null;
  strict?: boolean | null;
  [field: string]: unknown;
}

export interface Logprob {
  token: number;
  logprob: number;
  top: [number, number][];
}

/** The tokens of one round, or of several where one side fell behind. */
export interface Tokens {
  /** Of the first of `ids` in the completion. */
  index: number;
  ids: number[];
  /** Whole characters; may be empty. */
  text: string;
  /** CLOCK_MONOTONIC of the daemon's machine, when the first of them was accepted. */
  time_ns: Integer;
  logprobs: Logprob[] | null;
}

/** What came, and the fields of `done` in docs/wire.md. */
export interface Result {
  text: string;
  token_ids: number[];
  logprobs: Logprob[] | null;
  /** Of each token of the prompt behind those before it, where they were asked for; the first has none. */
  prompt_logprobs: (number | null)[] | null;
  /** The likeliest tokens in the place of each, likeliest first, where they were asked for; the first has none. */
  prompt_top_logprobs: ([number, number][] | null)[] | null;
  finish_reason: "stop" | "tool_calls" | "length" | "cancelled" | "timeout" | "deadline" | "error";
  usage: {
    prompt_tokens: number;
    cached_tokens: number;
    completion_tokens: number;
    rolled_back_tokens: number;
    scored_tokens?: number;
    choice_tokens?: number[];
  };
  timeline: Record<string, Integer>;
  seed: Integer;
  bundle: string;
  speculation: Record<string, unknown>;
  warnings: string[];
  choice?: { index: number; logprobs: number[]; probabilities: number[]; margin: number } | null;
  grammar?: { masks: number; forced_tokens: number };
  tool_calls?: { id: string; name: string; arguments: string }[];
  content?: string;
}

export interface GenerateOptions {
  /** Its abort ends the request, and what waits for it rejects with the signal's reason. */
  signal?: AbortSignal;
}

/** A completion under way. Leaving a `for await` over it before its end cancels it. */
export class Stream implements AsyncIterable<Tokens> {
  private constructor();
  /** The next tokens; null once it has ended. */
  next(): Promise<Tokens | null>;
  /** Has the daemon end it within one round: tokens on their way still come, then its end, "cancelled". */
  cancel(): void;
  /** Releases the answer of a request with `hold`. */
  commit(): Promise<void>;
  /** What came, once it has ended: reads what is left first. */
  result(): Promise<Result>;
  [Symbol.asyncIterator](): AsyncIterator<Tokens>;
}

export class Session {
  private constructor();
  readonly number: number;
  generate(request?: Request, options?: GenerateOptions): Stream;
  complete(request?: Request, options?: GenerateOptions): Promise<Result>;
  /** Reads a prompt ahead of the request that needs it; resolves to the tokens that the session then holds. */
  append(request: Request): Promise<number>;
  /** Another session that holds the same. */
  fork(): Promise<Session>;
  /** Takes the last tokens off it; resolves to the tokens that it then holds. */
  rollback(tokens: number): Promise<number>;
  /** Keeps so many tokens, or so many characters, of the last answer; resolves to the tokens that it then holds. */
  truncate(kept: { tokens: number } | { characters: number }): Promise<number>;
  /** Resolves to the tokens that it had. */
  close(): Promise<number>;
}

export interface ClientOptions {
  /** Of an ipc endpoint `auto` takes the daemon's local socket, where it is there and answers; else ZeroMQ. */
  transport?: "auto" | "local" | "zeromq";
  /** Milliseconds. */
  connectTimeout?: number;
  /** Milliseconds after which a request that nothing was heard of is asked after, and an answer is given up. */
  silenceTimeout?: number;
  /** The three keys of a client's key file (`ull keys new`), for a daemon that asks for them by tcp. */
  keys?: { server: string; public: string; secret: string };
}

/** Connects with the first request, and again with the next one where the connection has ended. */
export class Client {
  constructor(url?: string, options?: ClientOptions);
  generate(request: Request, options?: GenerateOptions): Stream;
  complete(request: Request, options?: GenerateOptions): Promise<Result>;
  openSession(options?: { pin?: boolean }): Promise<Session>;
  /** The ids that a request of the same `prompt` or `messages` would use. */
  tokenize(request: Request): Promise<number[]>;
  countTokens(request: Request): Promise<number>;
  /** The text that a stream of these ids would give. */
  detokenize(ids: number[]): Promise<string>;
  health(): Promise<{ status: string; uptime_ns: Integer; queue_length: number }>;
  info(): Promise<{ engine: any; executor: any; limits: any }>;
  stats(): Promise<Record<string, any>>;
  /** Ends the connection, and with it every request and session. */
  close(): void;
}

/** Where daemon and clients of one user meet where nothing is configured. */
export function defaultUrl(): string;

/** `code` is one of docs/wire.md, or "disconnected", "protocol" or "usage". */
export class UllError extends Error {
  readonly code: string;
}
/** The daemon refused a request: nothing of it has run. */
export class RefusedError extends UllError {
  readonly field: string | null;
  readonly retryAfterMs: number | null;
  readonly queueLength: number | null;
  readonly expectedMs: number | null;
}
/** A request that was accepted has failed; `result` has what came before. */
export class FailedError extends UllError {
  readonly result: Result;
}
/** There is no daemon, it has gone, or it does not answer. */
export class DisconnectedError extends UllError {}
/** A message of the daemon is none that docs/wire.md has. */
export class ProtocolError extends UllError {}
/** A call that makes no sense. */
export class UsageError extends UllError {}
