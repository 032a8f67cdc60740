// The traces of one robot: requested and applied commands, active limits, latencies, and the phases of its episode.

import { limitWords } from "./card.js";
import { drawPhases, linePlot, removePlots } from "./plots.js";

const SHOWN_S = 15;
const GAP_S = 0.5; // a longer pause between control periods is a gap in the curves
const MAX_STEPS = 2000; // drawn in the timeline

const el = (id) => document.getElementById(id);

export class Traces {
  // `request(name)` requests the traces of a robot from the server.
  constructor(request) {
    this.request = request;
    this.robot = "";
    this.clear();
    new ResizeObserver(() => this.resize()).observe(el("traces"));
  }

  clear() {
    removePlots(this.plots);
    this.plots = [];
    this.periods = [];
    this.signals = [];
    this.limits = [];
    el("limit-words").textContent = "none";
    el("traces-empty").hidden = false;
  }

  // Shows another robot; an empty name shows none. Also after a new connection.
  select(robot, renew = false) {
    if (robot === this.robot && !renew) return;
    this.robot = robot;
    this.clear();
    el("signals").hidden = !robot;
    el("signals-of").textContent = robot;
    this.request(robot);
  }

  // A plot keeps the width at which it was made.
  resize() {
    if (this.width === el("traces").clientWidth) return;
    this.width = el("traces").clientWidth;
    removePlots(this.plots);
    this.plots = [];
    this.draw();
  }

  add({ robot, signals, periods, limits }) {
    if (robot !== this.robot) return;
    if (signals.length) this.signals = signals;
    if (limits.length) this.limits = limits;
    this.periods.push(...periods.map(([t, requested, applied, bits, act, apply]) => ({ t, requested, applied, bits, act, apply })));
    const newest = this.periods.at(-1)?.t ?? 0;
    this.periods = this.periods.filter(({ t }) => t > newest - SHOWN_S && t <= newest);
    this.draw();
  }

  // From the observation to the applied command, of the newest control period; null if there is none.
  get latencyMs() {
    const newest = this.periods.at(-1);
    return newest ? newest.act + newest.apply : null;
  }

  draw() {
    if (!this.periods.length || !el("traces").clientWidth) return;
    el("traces-empty").hidden = true;
    const rows = this.withGaps();
    const newest = this.periods.at(-1).t;
    const x = rows.map((row) => row.t - newest);
    const contents = this.periods[0].requested.map((_, n) => this.command(n, rows, x));
    contents.push(["latency, ms", ["selected", "applied"], [x, rows.map((row) => row.act), rows.map((row) => row.apply)]]);
    if (this.plots.length === contents.length) {
      contents.forEach(([, , content], n) => this.plots[n].setData(content));
    } else {
      removePlots(this.plots);
      this.plots = contents.map(([title, labels, content]) => linePlot(el("traces"), title, labels, content, ["low", "high"]));
    }
    this.drawLimits();
  }

  command(n, rows, x) {
    const { label = `action ${n}`, unit = "", low = null, high = null } = this.signals[n] ?? {};
    const bounds = Number.isFinite(low) && Number.isFinite(high);
    const curves = [rows.map((row) => row.requested?.[n] ?? null), rows.map((row) => row.applied?.[n] ?? null)];
    if (bounds) curves.push(...[low, high].map((bound) => rows.map(() => bound)));
    const labels = ["requested", "applied", ...(bounds ? ["low", "high"] : [])];
    return [unit && unit !== "1" ? `${label}, ${unit}` : label, labels, [x, ...curves]];
  }

  withGaps() {
    return this.periods.flatMap((period, i) => {
      const before = this.periods[i - 1];
      return before && period.t - before.t > GAP_S ? [{ t: before.t + 0.01, act: null, apply: null }, period] : [period];
    });
  }

  // The share of the shown time at which each limit was active, and a strip of these times.
  drawLimits() {
    const canvas = el("limits");
    canvas.width = 600;
    const pen = canvas.getContext("2d");
    const newest = this.periods.at(-1).t;
    pen.fillStyle = "#f0b44a";
    const active = this.periods.filter(({ bits }) => bits);
    for (const { t } of active) pen.fillRect(600 * (1 - (newest - t) / SHOWN_S) - 2, 0, 2, canvas.height);
    const bits = active.reduce((all, period) => all | period.bits, 0);
    el("limit-words").textContent = limitWords(this.limits.filter((_, n) => bits & (1 << n))) || "none";
  }

  // `robot`: as the server shows it.
  showTimeline({ phases, status }) {
    const stride = Math.max(1, Math.ceil((status.step + 1) / MAX_STEPS));
    const steps = Array.from({ length: Math.ceil((status.step + 1) / stride) }, (_, n) => n * stride);
    drawPhases(el("timeline"), steps.map((step) => phases.findLast(([since]) => since <= step)?.[1]));
    el("timeline-words").textContent = `step ${status.step} · ${status.phase}`;
  }
}
