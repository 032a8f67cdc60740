// Line plots of traces with uPlot, and strips of coloured sections. The page loads uPlot before.

import { AXIS, COLOURS } from "./chart.js";

const HEIGHT = 90;
export const OTHER = "#8b96a5";
export const PHASES = { policy: "#5cc8b4", teleop: "#f0b44a", correction: "#e5484d", recovery: "#a793f2", trimmed: "#3a4350" };

// A constant curve lies in the middle of its plot.
function range(plot, low, high) {
  const margin = 0.1 * (high - low) || 0.5;
  return [low - margin, high + margin];
}

// One plot; two fit side by side in a wide `parent`. `content` has x, and y of each label; `dashed` names bounds.
export function linePlot(parent, title, labels, content, dashed = []) {
  const width = parent.clientWidth < 540 ? parent.clientWidth : parent.clientWidth / 2 - 12;
  const series = labels.map((label, n) => ({
    label, stroke: dashed.includes(label) ? OTHER : COLOURS[n % COLOURS.length], width: 1.5,
    dash: dashed.includes(label) ? [4, 4] : undefined, points: { show: false },
  }));
  const options = {
    title, width, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false } },
    scales: { x: { time: false }, y: { range } }, axes: [{ ...AXIS, size: 20 }, AXIS], series: [{ label: "x" }, ...series],
  };
  return new uPlot(options, content, parent);
}

export function removePlots(plots) {
  for (const plot of plots ?? []) plot.destroy();
}

// One pixel for each phase; the canvas is stretched.
export function drawPhases(canvas, phases) {
  canvas.width = Math.max(1, phases.length);
  const pen = canvas.getContext("2d");
  phases.forEach((phase, step) => {
    pen.fillStyle = PHASES[phase] ?? OTHER;
    pen.fillRect(step, 0, 1, canvas.height);
  });
}
