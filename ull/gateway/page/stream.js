// A completion as it arrives: the request, and the events of its answer.

export const LOST = "The connection was lost before the answer had ended.";

/** What the gateway has refused, or what has failed within a stream. */
export class Refusal extends Error {
  constructor(status, error, retryAfter = null) {
    super(error?.message ?? `the gateway answers with status ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter; // seconds
  }
}

/** The headers of every request; `key`: the API key, where one is asked for. */
export function headers(key) {
  const all = { "content-type": "application/json" };
  if (key) all.authorization = `Bearer ${key}`;
  return all;
}

/** What the gateway serves. Throws Refusal. */
export async function askModel(key) {
  const answer = await fetch("v1/models", { headers: headers(key) });
  await refuse(answer);
  return (await answer.json()).data[0];
}

/** Streams a completion: yields each chunk with the time of its arrival. Throws Refusal, AbortError, TypeError. */
export async function* complete(path, body, key, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, include_timing: true } }),
    signal,
  });
  await refuse(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refusal(0, { message: LOST });
    const now = performance.now();
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.slice(event.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(200, chunk.error);
      yield { chunk, now };
    }
  }
}

async function refuse(answer) {
  if (answer.ok) return;
  const body = await answer.json().catch(() => null);
  throw new Refusal(answer.status, body?.error, Number(answer.headers.get("retry-after")) || null);
}
