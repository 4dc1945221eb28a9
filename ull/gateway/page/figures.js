// What the rounds of an answer say about latency. Times are in milliseconds.

/** The value below which `share` of `values` lie: the nearest rank. */
export function percentile(values, share) {
  if (!values.length) return NaN;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

/** The times between neighbours. */
export function gaps(times) {
  return times.slice(1).map((time, place) => time - times[place]);
}

/**
 * One side's figures. `times`: of each round; `tokens`: of all rounds; `start`: when the request was there (engine) or
 * sent (browser). As AIPerf has them, ITL is (last - first) / (tokens - 1); the gaps are from round to round.
 */
export function side(times, tokens, start) {
  if (!times.length) return null;
  const span = times[times.length - 1] - times[0];
  const between = gaps(times);
  const itl = tokens > 1 ? span / (tokens - 1) : NaN;
  return {
    ttft: times[0] - start,
    p50: percentile(between, 0.5),
    p90: percentile(between, 0.9),
    p99: percentile(between, 0.99),
    itl,
    rate: itl > 0 ? 1000 / itl : NaN,
  };
}

/** A time to read: three digits that count. */
export function ms(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0 ms";
  if (value < 1) return `${(value * 1000).toPrecision(3)} µs`;
  return value < 1000 ? `${value.toPrecision(3)} ms` : `${(value / 1000).toPrecision(3)} s`;
}

/** A number to read. */
export function number(value, digits = 3) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : "–";
}
