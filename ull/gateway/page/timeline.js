// The rounds of one answer over time, on a canvas: a bar for each round, its height the tokens that it made.

const EDGE = 28; // pixels below the bars, for the scale
const ARRIVALS = 10; // pixels above them, for the marks of arrivals

/** Draws what `show` was last given; `onChoose(place)` is called for the round under the pointer. */
export class Timeline {
  constructor(canvas, onChoose) {
    this.canvas = canvas;
    this.rounds = [];
    this.chosen = -1;
    canvas.addEventListener("pointermove", (event) => onChoose(this.at(event.offsetX)));
    canvas.addEventListener("pointerleave", () => onChoose(-1));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** `rounds`: of `time` (ms from the request's receipt), `arrival` (ms from its sending) and `tokens`. */
  show(rounds, chosen = -1) {
    this.rounds = rounds;
    this.chosen = chosen;
    this.draw();
  }

  /** The round nearest to a place on the canvas; -1: there is none. */
  at(x) {
    const goal = (x / this.canvas.clientWidth) * this.span();
    let best = -1;
    let distance = Infinity;
    this.rounds.forEach((round, place) => {
      if (Math.abs(round.time - goal) < distance) {
        best = place;
        distance = Math.abs(round.time - goal);
      }
    });
    return best;
  }

  span() {
    const last = this.rounds.at(-1);
    return last ? Math.max(last.time, last.arrival) * 1.02 || 1 : 1;
  }

  draw() {
    const { canvas, rounds } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const span = this.span();
    const floor = height - EDGE;
    const most = Math.max(1, ...rounds.map((round) => round.tokens));
    const bar = Math.min(6, Math.max(1, (width / Math.max(1, rounds.length)) * 0.6));
    rounds.forEach((round, place) => {
      const x = (round.time / span) * width;
      const tall = (round.tokens / most) * (floor - ARRIVALS - 8);
      paint.fillStyle = colour(place === this.chosen ? "--ink" : "--accent");
      paint.fillRect(x - bar / 2, floor - tall, bar, tall);
      paint.fillStyle = colour("--arrival");
      paint.fillRect((round.arrival / span) * width - 1, 4, 2, ARRIVALS - 4);
    });
    paint.fillStyle = colour("--line");
    paint.fillRect(0, floor, width, 1);
    paint.fillStyle = colour("--quiet");
    paint.font = "12px system-ui, sans-serif";
    const step = niceStep(rounds.length ? span / Math.max(2, Math.floor(width / 90)) : 1);
    for (let time = 0; rounds.length && time <= span; time += step) {
      const x = (time / span) * width;
      paint.fillRect(x, floor, 1, 4);
      const text = time >= 1000 ? `${Number((time / 1000).toPrecision(6))} s` : `${Number(time.toPrecision(6))} ms`;
      paint.textAlign = x < 20 ? "left" : x > width - 30 ? "right" : "center";
      paint.fillText(text, x, height - 9);
    }
  }
}

/** The least of 1, 2, 5, 10, ... that is not below `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999) ?? least;
}
