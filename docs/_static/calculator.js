// The planner's model of `uniform_link`, in the browser: see "The model" in planner.md.
// tests/pages/test_calculator.py compares it with jaxcomp.planner.

// Bits per parameter and direction of a round, and the share of steps that have one. What changes
// less of the algorithm comes first.
const METHODS = [
  { name: "dense float32", bits: 32, times: 1, exact: true, loss: "" },
  { name: "8-bit mean", bits: 8.125, times: 1, loss: "as dense" },
  { name: "4-bit mean", bits: 4.125, times: 1, loss: "as dense, or near" },
  { name: "0/1 Adam, every 4th step", bits: 1.03125, times: 1 / 4, loss: "near, after a warm-up" },
  { name: "CocktailSGD", bits: 0.18375, times: 1, loss: "higher from scratch" },
  {
    name: "local steps, 4 bits, every 16th",
    bits: 4.125,
    times: 1 / 16,
    loss: "higher in a short run",
    least: 8000, // steps
  },
];
const TOLERANCE = 0.05; // a gain that nobody would notice

// What one method's step takes: seconds, of which the network takes some, and bytes sent.
// replicas, parameters; rate in bit/s; latency and compute in seconds; codecRate in bytes/s.
function predict(method, { replicas, parameters, rate, latency, compute, codecRate }) {
  const share = (replicas - 1) / replicas;
  const half = (parameters * method.bits * share) / 8;
  // An all-reduce has 2 rounds, an all-to-all one and an all-gather R-1.
  const rounds = method.exact ? 2 * (replicas - 1) : replicas;
  const network = method.times * (rounds * latency + (8 * 2 * half) / rate);
  const codec = method.exact ? 0 : (method.times * 4 * parameters) / codecRate;
  return { network, sent: method.times * 2 * half, step: compute + network + codec };
}

// All methods' predictions, and the first one within 5% of the fastest that suits a run so long.
function plan(settings) {
  const rows = METHODS.map((method) => ({ ...method, ...predict(method, settings) }));
  const { steps = Infinity } = settings;
  const suited = rows.filter((row) => steps >= (row.least || 0));
  const fastest = Math.min(...suited.map((row) => row.step));
  const best = suited.find((row) => row.step <= (1 + TOLERANCE) * fastest);
  return { rows, best: best.name, gain: rows[0].step / best.step };
}

if (typeof document === "undefined") {
  module.exports = { METHODS, plan };
} else {
  const form = document.getElementById("calculator");
  const output = document.getElementById("prediction");
  const number = (name) => Number(form.elements[name].value);
  const written = (seconds) =>
    seconds < 1 ? `${(1e3 * seconds).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
  const show = () => {
    const { rows, best, gain } = plan({
      replicas: number("replicas"),
      parameters: 1e6 * number("parameters"),
      rate: 1e6 * number("rate"),
      latency: 1e-3 * number("latency"),
      compute: number("compute"),
      codecRate: 1e9 * number("codec"),
      steps: number("steps"),
    });
    if (!form.checkValidity() || !rows.every((row) => Number.isFinite(row.step))) {
      output.textContent = "Fill in every field with a number in its range.";
      return;
    }
    const verdict =
      best === rows[0].name
        ? "Do not compress: the best method saves less than 5% of a step."
        : `Take ${best}: a step is ${gain.toPrecision(3)} times as fast as a dense one.`;
    const longest = Math.max(...rows.map((row) => row.step));
    const bar = (row) => `<td class="bar"><i style="width:${(100 * row.step) / longest}%"></i></td>`;
    const line = (row) =>
      `<tr><td>${row.name}</td><td>${written(row.step)}</td>` +
      `<td>${((100 * row.network) / row.step).toFixed(0)}%</td><td>${row.loss}</td>${bar(row)}</tr>`;
    output.innerHTML =
      `<p><strong>${verdict}</strong></p><table><thead><tr><th>method</th><th>step</th>` +
      `<th>network</th><th>loss</th><th></th></tr></thead><tbody>${rows.map(line).join("")}</tbody></table>`;
  };
  form.addEventListener("input", show);
  show();
}
