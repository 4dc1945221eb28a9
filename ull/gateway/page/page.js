// The page: asks, shows tokens as they arrive, and says what every round has taken.

import { gaps, ms, number, percentile, side } from "./figures.js";
import { LOST, Refusal, askModel, complete } from "./stream.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const KEY = "ull-key";
const THEME = "ull-theme";
const MOST_RUNS = 50;
const HEALTH_MS = 5000;
const END_PX = 40; // this near to its end, the output is at its end

let model = null; // what the gateway serves
let messages = []; // the chat so far
let running = null; // the AbortController of the answer that is under way
let well = true; // whether the daemon was, when it was last asked
let rounds = []; // of the answer that is shown: { time, arrival, tokens, ids, stamp }
let spans = []; // their texts
let following = true; // whether the output scrolls with the text
let chosen = -1; // the round whose details are shown
const runs = [];
const empty = $("empty"); // what stands where nothing was said
const timeline = new Timeline($("timeline"), choose);

// ---- asking

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("cancel").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("clear").addEventListener("click", () => {
  if (running) return;
  messages = [];
  $("output").replaceChildren(empty);
  showRounds([], []);
  say("A new conversation.");
  $("prompt").focus();
});
$("mode").addEventListener("change", followMode);

async function ask() {
  const prompt = $("prompt").value;
  if (!prompt) return say("Type a prompt first.");
  if (!model && !(await meet())) return;
  if (running) return; // sent twice while the model was asked for
  const chat = $("mode").value === "chat";
  const turns = chat ? [...messages, { role: "user", content: prompt }] : null;
  const system = $("system").value;
  const body = { model: model.id, max_tokens: Number($("max-tokens").value) || 256 };
  body.temperature = Number($("temperature").value) || 0;
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if ($("drafter").value) body.speculate = $("drafter").value;
  if (chat) body.messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  else body.prompt = prompt;

  const asked = addTurn("user", prompt);
  const answer = addTurn("assistant", "");
  const result = begin(answer);
  try {
    await receive(complete(chat ? "v1/chat/completions" : "v1/completions", body, storedKey(), running.signal), result);
    if (chat) messages = [...turns, { role: "assistant", content: result.text }];
    forget(prompt);
    say(`Done: ${result.told.finish_reason}, ${result.tokens} tokens.`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!result.text) {
      asked.remove();
      answer.remove();
    } else if (stopped) {
      if (chat) messages = [...turns, { role: "assistant", content: result.text }];
      forget(prompt);
    } else {
      // The prompt is still in its box: sent again, it must not follow on what broke off.
      asked.classList.add("broken");
      answer.classList.add("broken");
    }
    if (stopped) say(result.text ? "Stopped. What had come stays." : "Stopped.");
    else explain(error, result.text ? `What had come is shown${chat ? ", and is no part of the conversation" : ""}.` : "");
  } finally {
    finish(result);
  }
}

/** Empties the box of what was sent; what was typed since then stays. */
function forget(prompt) {
  if ($("prompt").value === prompt) $("prompt").value = "";
}

/** A new answer: what it will hold. */
function begin(turn) {
  running = new AbortController();
  following = true;
  $("send").disabled = true;
  $("clear").disabled = true;
  $("cancel").disabled = false;
  $("error").textContent = "";
  say("Asking.");
  showRounds([], []);
  return { turn, text: "", tokens: 0, sent: performance.now(), told: null, usage: null, drafter: "" };
}

/** Takes in the chunks, and paints once for each frame of the screen. */
async function receive(chunks, result) {
  let painting = 0;
  for await (const { chunk, now } of chunks) {
    const choice = chunk.choices[0];
    if (chunk.ull?.token_ids) {
      const text = choice.delta ? (choice.delta.content ?? "") : (choice.text ?? "");
      if (!rounds.length) say("Answering.");
      addRound(result, chunk.ull, text, now);
    } else if (chunk.ull) {
      result.told = chunk.ull;
      result.usage = chunk.usage;
    } else if (choice) {
      const rest = choice.delta ? (choice.delta.content ?? "") : (choice.text ?? "");
      if (rest) result.text += appendText(result.turn, rest, "").textContent;
    }
    if (!painting) {
      painting = requestAnimationFrame(() => {
        painting = 0;
        paint();
      });
    }
  }
}

function addRound(result, told, text, now) {
  const first = rounds[0];
  const arrival = now - result.sent;
  // Until the end says when the engine received the request, the first round stands where it arrived.
  const time = first ? first.time + (told.time_ns - first.stamp) / 1e6 : arrival;
  rounds.push({ time, arrival, tokens: told.token_ids.length, ids: told.token_ids, stamp: told.time_ns });
  spans.push(appendText(result.turn, text, rounds.length % 2 ? "" : "odd"));
  result.text += text;
  result.tokens += told.token_ids.length;
}

function finish(result) {
  running = null;
  $("send").disabled = false;
  $("clear").disabled = false;
  $("cancel").disabled = true;
  if (result.told && rounds.length) {
    const received = result.told.timeline.received_ns;
    for (const round of rounds) round.time = (round.stamp - received) / 1e6;
  }
  paint();
  showFigures(result);
  const focused = document.activeElement;
  if (focused === document.body || focused.disabled) $("prompt").focus(); // else it stays where the user has put it
}

// ---- what is shown

function addTurn(role, text) {
  empty.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  $("output").append(turn);
  return turn;
}

function appendText(turn, text, kind) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  turn.append(span);
  return span;
}

function paint() {
  timeline.show(rounds, chosen);
  if (following) $("output").scrollTop = $("output").scrollHeight;
}

// Who scrolls up to read is left there; back at the end, the text is followed again.
$("output").addEventListener("scroll", () => {
  const { scrollTop, clientHeight, scrollHeight } = $("output");
  following = scrollTop + clientHeight > scrollHeight - END_PX;
});

function showRounds(newRounds, newSpans) {
  rounds = newRounds;
  spans = newSpans;
  choose(-1);
  timeline.show(rounds);
}

/** Shows one round's details; -1: none's. */
function choose(place) {
  if (place === chosen || (place >= 0 && !rounds[place])) return;
  spans[chosen]?.classList.remove("chosen");
  chosen = place;
  const round = rounds[place];
  spans[place]?.classList.add("chosen");
  const before = rounds[place - 1];
  const took = before ? `, ${ms(round.time - before.time)} behind the one before` : "";
  $("round").textContent = round
    ? `Round ${place + 1} of ${rounds.length}: at ${ms(round.time)}${took}; tokens ${round.ids.join(" ") || "none"}`
    : "\u00a0";
  if (!running) timeline.show(rounds, chosen);
}

$("output").addEventListener("pointermove", (event) => choose(spans.indexOf(event.target)));
$("output").addEventListener("pointerleave", () => choose(-1));
$("output").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const goal = step ? chosen + step : { Home: 0, End: rounds.length - 1 }[event.key];
  if (goal === undefined || !rounds.length) return;
  event.preventDefault();
  following = false;
  choose(Math.max(0, Math.min(rounds.length - 1, goal)));
  spans[chosen]?.scrollIntoView({ block: "nearest" });
});

function showFigures(result) {
  const tokens = result.tokens;
  const engine = side(rounds.map((round) => round.time), tokens, 0);
  const here = side(rounds.map((round) => round.arrival), tokens, 0);
  const known = result.told ? engine : null; // without the end nobody knows when the engine had the request
  for (const [name, figures] of [["engine", engine], ["here", here]]) {
    $(`ttft-${name}`).textContent = ms(name === "engine" ? known?.ttft : figures?.ttft);
    for (const share of [50, 90, 99]) $(`gap-${share}-${name}`).textContent = ms(figures?.[`p${share}`]);
    $(`itl-${name}`).textContent = ms(figures?.itl);
    $(`rate-${name}`).textContent = number(figures?.rate);
  }
  const told = result.told;
  const ends = rounds.length > 1 ? `, from ${ms(rounds[0].time)} to ${ms(rounds.at(-1).time)}` : "";
  $("timeline").setAttribute("aria-label", `Time of every round: ${rounds.length} rounds${ends}`);
  $("tokens").textContent = String(tokens);
  $("rounds").textContent = String(rounds.length);
  $("per-round").textContent = number(told ? told.speculation.tokens_per_round : tokens / rounds.length);
  $("cached").textContent = result.usage
    ? `${result.usage.prompt_tokens}, ${result.usage.prompt_tokens_details.cached_tokens}`
    : "–";
  $("seed-used").textContent = told ? String(told.seed) : "–";
  $("finish").textContent = told ? told.finish_reason : rounds.length ? "not to its end" : "–";
  showAcceptance(told);
  if (told && here) addRun(result, here, told);
}

function showAcceptance(told) {
  const depths = told?.speculation.accepted_by_depth ?? [];
  const drafted = told ? told.speculation.rounds - (told.speculation.by_drafter.none ?? 0) : 0;
  const list = $("acceptance");
  list.replaceChildren();
  if (!drafted) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = told ? "Nothing was drafted." : "–";
    list.append(none);
    return;
  }
  depths.forEach((count, depth) => {
    const share = count / drafted;
    const item = document.createElement("li");
    const meter = document.createElement("meter");
    meter.value = share;
    meter.setAttribute("aria-label", `accepted to a depth of ${depth + 1} or beyond`);
    const text = document.createElement("span");
    text.className = "share";
    text.textContent = `${Math.round(share * 100)} %`;
    item.append(String(depth + 1), meter, text);
    list.append(item);
  });
  if (!depths.length) list.append(Object.assign(document.createElement("li"), { className: "none", textContent: "None was accepted." }));
}

function addRun(result, here, told) {
  const drafters = Object.entries(told.speculation.by_drafter).sort((a, b) => b[1] - a[1]);
  runs.unshift({ ttft: here.ttft, gaps: gaps(rounds.map((round) => round.arrival)) });
  runs.length = Math.min(runs.length, MOST_RUNS);
  const cells = [
    $("runs").tBodies[0].rows.length ? Number($("runs").tBodies[0].rows[0].cells[0].textContent) + 1 : 1,
    result.tokens,
    ms(here.ttft),
    ms(here.itl),
    ms(here.p99),
    number(told.speculation.tokens_per_round),
    drafters[0]?.[0] ?? "–",
  ];
  const row = $("runs").tBodies[0].insertRow(0);
  for (const cell of cells) row.insertCell().textContent = String(cell);
  while ($("runs").tBodies[0].rows.length > MOST_RUNS) $("runs").tBodies[0].deleteRow(-1);
  const firsts = runs.map((run) => run.ttft);
  const between = runs.flatMap((run) => run.gaps);
  $("over-runs").textContent =
    `As seen here, over ${runs.length}: first token p50 ${ms(percentile(firsts, 0.5))}, p99 ${ms(percentile(firsts, 0.99))}; ` +
    `between rounds p50 ${ms(percentile(between, 0.5))}, p99 ${ms(percentile(between, 0.99))}.`;
}

function say(text) {
  $("status").textContent = text;
}

/** Says what went wrong, where it went wrong; what was typed stays. `broken`: what else to say of an answer in part. */
function explain(error, broken = "") {
  say(broken);
  if (error instanceof Refusal && error.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
    $("error").textContent = storedKey() ? "This key is not valid here." : "";
    sessionStorage.removeItem(KEY);
    return;
  }
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  if (error.code === "model_not_found") model = null; // another one is served by now: ask which
  const text = error instanceof Refusal ? error.message : broken ? LOST : "The gateway cannot be reached.";
  $("error").textContent = text + (/[.!?]$/.test(text) ? "" : ".") + again;
}

// ---- who is there

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  if (await meet()) {
    $("key-form").hidden = true;
    $("error").textContent = "";
    $("prompt").focus();
  }
});

function storedKey() {
  return sessionStorage.getItem(KEY);
}

/** Asks what is served, and fills in what depends on it. */
async function meet() {
  try {
    model = await askModel(storedKey());
  } catch (error) {
    explain(error);
    return false;
  }
  const { engine, executor, limits } = model.ull;
  $("model").textContent = `${model.id} on ${executor.name}, context ${limits.context}`;
  document.title = `ull: ${model.id}`;
  $("max-tokens").max = String(limits.max_tokens);
  $("max-tokens").value = String(Math.min(Number($("max-tokens").value) || 256, limits.max_tokens));
  const drafter = $("drafter").value;
  $("drafter").replaceChildren(new Option(`default: ${limits.default_drafter}`, ""));
  for (const name of limits.drafters) $("drafter").append(new Option(name, name));
  $("drafter").value = limits.drafters.includes(drafter) ? drafter : "";
  const chat = $("mode").querySelector("[value=chat]");
  chat.disabled = !engine.chat_template;
  if (chat.disabled) $("mode").value = "text";
  followMode();
  return true;
}

function followMode() {
  const chat = $("mode").value === "chat";
  $("system").disabled = !chat;
  $("prompt-label").textContent = chat ? "Your turn" : "Text to complete";
}

async function showHealth() {
  let status = "unreachable";
  try {
    status = (await (await fetch("health")).json()).status;
  } catch {
    // it stays what it is
  }
  const words = { ok: "ready", unreachable: "not there", draining: "stopping", journal_unavailable: "cannot record" };
  $("health").dataset.status = status === "ok" ? "ok" : "bad";
  $("health-text").textContent = words[status] ?? status;
  const back = !well; // perhaps with another engine
  well = status === "ok";
  if (well && (back || !model) && !running && $("key-form").hidden) {
    const known = model !== null; // then what stands there is of an answer
    if ((await meet()) && !known) $("error").textContent = "";
  }
}

// ---- light and dark

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.draw());

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
  timeline.draw();
}

if (localStorage.getItem(THEME)) setTheme(localStorage.getItem(THEME));
followMode();
meet();
showHealth();
setInterval(() => document.visibilityState === "visible" && showHealth(), HEALTH_MS);
$("prompt").focus();
