// Runs one scenario of the Node client against a daemon: driver.mjs SCENARIO URL [TRANSPORT [ARGUMENT]]. What it saw it
// prints line by line, a name and values, as driver.cpp does.
import { createInterface } from "node:readline/promises";

import { Client, FailedError, RefusedError, UllError } from "ull-client";

function print(name, ...values) {
  const texts = values.map((value) => (typeof value === "boolean" ? Number(value) : value));
  console.log([name, ...texts].join(" "));
}

/** Prints what a call throws: the code, and the field of what was refused. */
async function caught(name, call) {
  try {
    await call();
    print(name, "nothing");
  } catch (error) {
    if (error instanceof RefusedError) print(name, "refused", error.code, error.field ?? "-");
    else if (error instanceof FailedError) print(name, "failed", error.code);
    else if (error instanceof UllError) {
      print(name, error.code);
      console.error(error.message);
    } else throw error;
  }
}

async function sampled(client, seed) {
  const prompt = "def add(first, second):\n";
  const stream = client.generate({ prompt, max_tokens: 24, temperature: 0.8, seed: BigInt(seed) });
  let text = "";
  const ids = [];
  for await (const tokens of stream) {
    if (tokens.index !== ids.length || !tokens.time_ns) print("wrong", tokens.index);
    text += tokens.text;
    ids.push(...tokens.ids);
  }
  const result = await stream.result();
  print("ids", ...result.token_ids);
  print("same", result.text === text && String(result.token_ids) === String(ids) && ids.length > 0);
  print("done", result.finish_reason, result.seed, result.usage.completion_tokens, result.bundle.length);
  print("rounds", result.speculation.rounds > 0);
  print("after", (await stream.next()) !== null);
}

async function interleaved(client) {
  const streams = [0, 1, 2].map((number) => client.generate({ prompt: `item ${number}`, max_tokens: 20 }));
  for (let any = true; any; ) {
    const found = [];
    for (const stream of streams) found.push(await stream.next());
    any = found.some((tokens) => tokens !== null);
  }
  for (const stream of streams) print("ids", ...(await stream.result()).token_ids);
}

async function cancelled(client) {
  const stream = client.generate({ prompt: "a", max_tokens: 4000, ignore_eos: true });
  await stream.next();
  stream.cancel();
  print("done", (await stream.result()).finish_reason);
  for await (const tokens of client.generate({ prompt: "b", max_tokens: 4000, ignore_eos: true })) {
    if (tokens.index > 2) break;
  }
  print("then", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
}

async function sessions(client) {
  const session = await client.openSession();
  const read = await session.append({ prompt: "def add(first, second):\n" });
  const { usage } = await session.complete({ prompt: "    return ", max_tokens: 8 });
  print("cached", usage.cached_tokens >= read - 1, usage.prompt_tokens > read);
  const held = usage.prompt_tokens + usage.completion_tokens;
  const fork = await session.fork();
  print("rolled", (await fork.rollback(2)) === held - 2);
  print("cut", (await session.truncate({ tokens: 3 })) === held - 5);
  print("cut", (await session.truncate({ characters: 0 })) === held - 8);
  print("closed", (await fork.close()) === held - 2);
  await caught("gone", () => fork.rollback(1));
  await caught("bad", () => session.rollback(100000));
}

async function held(client) {
  const session = await client.openSession();
  const stream = session.generate({ prompt: "def add(", max_tokens: 6, hold: true });
  await stream.commit();
  const result = await stream.result();
  print("done", result.finish_reason, result.token_ids.length);
  await caught("again", () => stream.commit());
}

async function exact(client) {
  const { choice } = await client.complete({ prompt: "The answer is", choices: [" yes", " no", " maybe"] });
  print("choice", choice.index, choice.probabilities.length, choice.margin >= 0);
  const json_schema = {
    type: "object",
    properties: { n: { type: "integer", maximum: 9, minimum: 0 } },
    required: ["n"],
    additionalProperties: false,
  };
  print("json", (await client.complete({ prompt: "x", max_tokens: 40, json_schema })).text);
  print("regex", (await client.complete({ prompt: "x", max_tokens: 8, regex: "(up|down)" })).finish_reason);
  for await (const tokens of client.generate({ prompt: "x", max_tokens: 2, logit_bias: { 77: -5 }, logprobs: 2 })) {
    for (const entry of tokens.logprobs) print("top", entry.top.length, entry.top[0][1] >= entry.logprob);
  }
  const prompt = await client.tokenize({ prompt: "import os\nimport sys\n" });
  const asked = { token_ids: prompt, max_tokens: 2, prompt_logprobs: true, prompt_top_logprobs: 2 };
  const scored = await client.complete(asked);
  const [first, second] = scored.prompt_logprobs;
  const whole = scored.prompt_logprobs.length === prompt.length && first === null;
  print("prompt", whole, second < 0, scored.token_ids.length);
  const [none, ...top] = scored.prompt_top_logprobs;
  const all = none === null && top.every((pairs) => pairs.length === 2 && pairs[0][1] >= pairs[1][1]);
  print("likeliest", top.length + 1 === scored.prompt_logprobs.length, all, top[0][0][0]);
}

async function texts(client) {
  const ids = await client.tokenize({ prompt: "import os" });
  print("ids", ...ids);
  print("count", (await client.countTokens({ prompt: "import os" })) === ids.length);
  print("text", await client.detokenize(ids));
  const messages = [{ role: "user", content: "Tell me of Rome." }];
  print("chat", (await client.complete({ messages, max_tokens: 4 })).usage.completion_tokens);
  print("health", (await client.health()).status);
  print("info", (await client.info()).limits.context > 0);
  print("stats", (await client.stats()).requests.accepted > 0);
}

async function wrong(client) {
  const refuse = (name, request) => caught(name, () => client.complete(request));
  await refuse("nothing", {});
  await refuse("both", { prompt: "a", token_ids: [1] });
  await refuse("hot", { prompt: "a", temperature: -1 });
  await refuse("type", { prompt: "a", top_k: "many" });
  await refuse("unknown", { prompt: "a", strict: true, colour: "red" });
  await refuse("long", { prompt: "x".repeat(100000) });
  await refuse("regex", { prompt: "a", regex: "(" });
  await refuse("late", { prompt: "a", max_tokens: 900, deadline_ms: 1 });
  await caught("session", async () => (await client.openSession()).rollback(1));
  print("then", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
  print("warned", (await client.complete({ prompt: "c", max_tokens: 1, colour: "red" })).warnings[0]);
  await caught("unread", async () => {
    const stream = client.generate({ max_tokens: 1 });
    await stream.next().catch(() => {});
    await stream.result();
  });
}

/** Prints "reading" once there are tokens: then the daemon is killed. A line on stdin says that there is a new one. */
async function killed(client) {
  const session = await client.openSession();
  const stream = client.generate({ prompt: "a", max_tokens: 100000, ignore_eos: true });
  await stream.next();
  print("reading");
  await caught("stream", () => stream.result());
  await caught("over", () => stream.next());
  await caught("session", () => session.rollback(0));
  const lines = createInterface({ input: process.stdin });
  for await (const _ of lines) break;
  print("then", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
  await caught("old", () => session.complete({ prompt: "c" }));
}

/** A message of more bytes than the daemon takes. */
async function too_long(client) {
  await caught("long", () => client.complete({ a: "y".repeat(9000), prompt: "x".repeat(15_000_000) }));
  print("then", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
}

/** Nothing is under way while the daemon makes room for another one: a line on stdin says that it has. */
async function idle(client) {
  print("first", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
  const lines = createInterface({ input: process.stdin });
  for await (const _ of lines) break;
  print("then", (await client.complete({ prompt: "c", max_tokens: 3 })).finish_reason);
}

/** Reads a while after everything has been sent. */
async function late(client) {
  const stream = client.generate({ prompt: "a" });
  await stream.next();
  await new Promise((resolve) => setTimeout(resolve, 500));
  print("text", (await stream.result()).text);
  await caught("health", () => client.health());
}

/** Whatever the daemon makes of a request. */
async function one(client) {
  await caught("one", async () => print("text", (await client.complete({ prompt: "a" })).text));
  await caught("health", () => client.health());
}

async function nobody(client) {
  await caught("health", () => client.health());
}

const scenarios = {
  sampled, interleaved, cancelled, sessions, held, exact, texts, wrong, killed, too_long, idle, late, one, nobody,
};
const [name, url, transport = "auto", argument = ""] = process.argv.slice(2);
const impatient = name === "one" || name === "nobody" ? { silenceTimeout: 1500, connectTimeout: 1500 } : {};
const [server, publicKey, secret] = (process.env.ULL_TEST_KEYS ?? "").split(" ");
const keys = secret ? { server, public: publicKey, secret } : undefined;
const client = new Client(url, { transport, keys, ...impatient });
await scenarios[name](client, argument);
client.close();
