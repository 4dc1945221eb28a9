// Streams a completion: node complete.js PROMPT [URL]. Ctrl-C cancels it.
import { Client, UllError } from "ull-client";

const [prompt, url] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node complete.js PROMPT [URL]");
  process.exit(2);
}
const client = new Client(url);
try {
  const stream = client.generate({ prompt, max_tokens: 32 });
  process.once("SIGINT", () => stream.cancel());
  for await (const tokens of stream) process.stdout.write(tokens.text);
  const { usage, finish_reason } = await stream.result();
  console.error(`\n${usage.completion_tokens} tokens, ${finish_reason}`);
} catch (error) {
  if (!(error instanceof UllError)) throw error;
  console.error(`complete: ${error.code}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
