// One robot on the page: its cameras, its operator, and the buttons that apply now.

import { minutes } from "./chart.js";

const RATES_OVER_MS = 2000;
const OLD_MS = 750; // a picture of this age is labelled with it
const SILENT_S = 0.9; // a robot without a report for so long is labelled with it
const LIMITS = {
  // reasons of the safety kernel in words; others are shown as they are
  bound: "range of the action",
  rate: "change of the action",
  workspace: "edge of the workspace",
  joint_position: "range of a joint",
  joint_velocity: "speed of a joint",
  stale: "old observation",
};

export class Card {
  // `give(order)` sends an order to this robot; `override(order, reason)` takes it out of use or puts it back; `choose()`
  // selects it for the keyboard; `open()` shows it alone; `stops` has the unconfirmed e-stops.
  constructor(name, { give, choose, open, override }, stops) {
    this.name = name;
    this.stops = stops;
    this.fresh = true;
    this.mine = this.heldMine = false;
    this.stoppedUntilMs = 0;
    this.cameras = new Map();
    this.node = document.getElementById("card").content.firstElementChild.cloneNode(true);
    this.node.setAttribute("aria-label", `Robot ${name}`);
    this.node.addEventListener("pointerdown", choose);
    this.slot("name").textContent = name;
    this.slot("name").addEventListener("click", open);
    this.showScene(name);
    for (const button of this.node.querySelectorAll("[data-override]")) {
      button.addEventListener("click", () => override(button.dataset.override, this.slot("reason").value));
    }
    for (const button of this.node.querySelectorAll("[data-order]")) {
      button.addEventListener("click", () => give(button.dataset.order));
    }
    this.showStop();
  }

  // The link to the robot's 3D view, or why there is none.
  async showScene(name) {
    const path = encodeURIComponent(name);
    const missing = await fetch(`/api/scene/${path}`).then((reply) => (reply.ok ? reply.json() : ""), () => "");
    const link = Object.assign(document.createElement("a"), { href: `/scene/${path}/`, target: "_blank", rel: "noopener", textContent: "3D view" });
    this.slot("scene").replaceChildren(missing || link);
  }

  slot(name) {
    return this.node.querySelector(`[data-slot="${name}"]`);
  }

  button(order) {
    return this.node.querySelector(`[data-order="${order}"]`);
  }

  // The operator's permitted orders; "" before the robot has reported.
  show(robot, me) {
    this.robot = robot;
    this.me = me;
    const status = robot.status;
    this.status = status;
    this.node.classList.toggle("lost", robot.lost || !status);
    this.mine = status?.authority === "human" && status.operator === me;
    this.heldMine = status?.authority === "hold" && status.operator === me;
    this.showStop();
    this.orderCameras(robot.cameras);
    const empty = this.slot("cameras").querySelector(".empty");
    if (empty) set(empty, robot.expects_cameras === false ? "no cameras" : "no pictures yet");
    if (status) this.showFacts(status, robot);
    this.showStart(Boolean(status?.awaits_reset));
    if (robot.last) this.showLast(robot.last);
  }

  // `fresh`: the server replies. Otherwise the robot's state is unknown, and only a stop is offered.
  showFreshness(fresh) {
    this.fresh = fresh;
    if (!fresh) this.mine = this.heldMine = false;
    for (const control of this.node.querySelectorAll(".admin button, .admin input")) control.disabled = !fresh;
    this.showStop();
  }

  // The driver has confirmed the e-stop: show it until the robot's status does.
  stopped(forMs) {
    this.stoppedUntilMs = performance.now() + forMs;
    this.showStop();
  }

  showStop() {
    this.showButtons();
    const waits = this.stops.waitedMs(this.name) !== undefined;
    this.button("cancel-stop").hidden = !this.stops.isUnconfirmed(this.name);
    if (waits) {
      const unconfirmed = this.stops.isUnconfirmed(this.name);
      this.badge("stopping", unconfirmed ? "NOT CONFIRMED" : "STOPPING …", unconfirmed ? "the stop is repeated until it is confirmed" : "");
    } else if (!this.fresh) {
      this.badge("unknown", "UNKNOWN", "no reply from the run");
    } else if (performance.now() < this.stoppedUntilMs) {
      this.badge("stopped", "STOPPED", "confirmed by its driver");
    } else if (this.robot) {
      this.showBadge(this.robot, this.me);
    }
  }

  badge(state, word, note) {
    set(this.slot("badge"), word);
    this.slot("badge").dataset.state = state;
    set(this.slot("note"), note);
  }

  showBadge(robot, me) {
    const { status, lost } = robot;
    const silent = minutes(robot.silent_s);
    // Out of use it is silent: its session waits for a lease.
    const unused = lost ? ["quarantined", "draining"].includes(robot.health) : robot.health === "quarantined" && status?.authority !== "stopped";
    const out = unused ? robot.health : lost ? "lost" : "";
    const state = out || (status?.authority ?? "waiting");
    const driver = status?.operator === me ? "YOU" : status?.operator;
    const scene = !out && status?.awaits_reset ? status.help : "";
    const words = { policy: "POLICY", human: driver, requesting: scene ? "RESET" : "HELP", hold: scene ? "RESET" : "HOLD", stopped: "STOPPED", waiting: "WAITING", lost: "LOST", quarantined: "QUARANTINED", draining: "DRAINING" };
    const notes = {
      human: status?.phase === "policy" ? "" : status?.phase,
      requesting: scene ? "" : `requests help: ${status?.help}`,
      hold: driver ? `held · last: ${driver}` : "held",
      stopped: driver ? `by ${driver} · re-arm to go on` : "re-arm to go on",
      waiting: `has not come in yet, for ${silent}`,
      lost: `no report for ${silent}`,
    };
    const order = ["quarantined", "draining"].includes(robot.health) ? `${robot.health} ${robot.health_note}` : "";
    const limits = state === "human" && status.limits.length ? `at its limit: ${limitWords(status.limits)}` : "";
    const silence = status && !lost && robot.silent_s > SILENT_S ? `no report for ${robot.silent_s.toFixed(1)} s` : "";
    const note = [silence, scene, notes[state], limits, order, lost ? "" : status?.note].filter(Boolean).join(" · ");
    this.badge(this.mine && !out ? "you" : state, words[state] ?? state, note);
  }

  showButtons() {
    const state = this.fresh ? this.status?.authority : undefined;
    const others = (this.others = state === "human" && !this.mine);
    const asked = this.status?.requested_by ?? "";
    const armed = Boolean(state) && state !== "stopped";
    this.button("take-over").disabled = !armed || this.mine || (others && Boolean(asked));
    set(this.button("take-over"), this.heldMine ? "Resume" : !others ? "Take over" : asked === this.me ? "Requested …" : "Request control");
    set(this.button("hand-back"), this.status?.awaits_reset ? "Reset done" : "Hand back");
    this.button("hand-back").disabled = !this.mine && !["hold", "requesting"].includes(state);
    const answerable = this.mine && Boolean(asked);
    this.slot("request").hidden = !answerable;
    for (const order of ["accept", "decline"]) this.button(order).disabled = !answerable;
    set(this.slot("requester"), `${asked} requests control`);
    this.button("pause").disabled = !armed || state === "hold";
    this.button("success").disabled = this.button("failure").disabled = !state || others || this.status.awaits_reset;
    this.button("reset").disabled = !armed || others;
    this.button("re-arm").disabled = state !== "stopped";
    this.node.classList.toggle("stopped", state === "stopped");
    this.node.classList.toggle("mine", this.mine);
  }

  showFacts(status, { behind, latency_ms: latencyMs }) {
    set(this.slot("task"), status.task || "–");
    set(this.slot("latency"), latencyMs === null ? "–" : `${latencyMs.toFixed(0)} ms`);
    set(this.slot("step"), status.step);
    set(this.slot("phase"), status.phase);
    const version = status.policy_version;
    set(this.slot("version"), version === -2 ? "another run's" : version < 0 ? "none" : `v${version}${behind ? ` · ${behind} behind` : ""}`);
    set(this.slot("rate"), `${status.control_hz.toFixed(0)} Hz${status.real_time ? " · real time" : ""}`);
    this.slot("rate").title = status.refused_realtime;
    const dropped = status.dropped_episodes ? ` · ${status.dropped_episodes} episodes dropped` : "";
    set(this.slot("outbox"), `${status.outbox_chunks}${dropped}`);
    set(this.slot("safety"), [status.safety_interventions, limitWords(status.limits)].filter(String).join(" · "));
    set(this.slot("episode"), status.episode);
  }

  // The outcome of the previous episode.
  showLast(last) {
    const end = last.success === null ? "cut off" : last.success ? "success" : "failure";
    const help = last.intervention_steps ? `, ${last.intervention_steps} by hand` : "";
    set(this.slot("last"), `${end} · ${last.steps} steps${help}`);
    this.slot("last").title = last.episode;
  }

  // While a person prepares the scene: the start of an episode over each live picture, half transparent.
  async showStart(wanted) {
    if (wanted === this.showsStart) return;
    this.showsStart = wanted;
    this.starts = new Map();
    this.node.classList.toggle("resetting", wanted);
    for (const image of this.node.querySelectorAll(".start")) image.remove();
    if (!wanted) return;
    const starts = await startPictures(this.name, this.status.task);
    if (!this.showsStart) return;
    this.starts = starts;
    for (const name of this.cameras.keys()) this.addStart(name);
  }

  // Over the live picture, if there is one: a fleet shows the first camera only.
  addStart(name) {
    const src = this.starts?.get(name);
    if (src) this.cameras.get(name).canvas.after(Object.assign(new Image(), { className: "start", alt: `start of an episode: ${name}`, src }));
  }

  async picture(header, jpeg) {
    const image = await createImageBitmap(jpeg);
    const camera = this.cameras.get(header.camera) ?? this.addCamera(header.camera);
    if (camera.canvas.width !== image.width || camera.canvas.height !== image.height) {
      camera.canvas.width = image.width;
      camera.canvas.height = image.height;
    }
    camera.canvas.getContext("2d").drawImage(image, 0, 0);
    image.close();
    this.showCameraRate(camera, header.age_s);
  }

  addCamera(name) {
    const figure = document.createElement("figure");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Live picture: ${name} camera of ${this.name}`);
    const caption = document.createElement("figcaption");
    const rate = document.createElement("small");
    caption.append(name, " ", rate);
    figure.append(canvas, caption);
    const cameras = this.slot("cameras");
    cameras.querySelector(".empty")?.remove();
    cameras.append(figure);
    const camera = { canvas, rate, times: [], capturedMs: performance.now() };
    this.cameras.set(name, camera);
    this.addStart(name);
    return camera;
  }

  // Pictures come in any order; the robot's own order stays.
  orderCameras(names) {
    const figures = names.map((name) => this.cameras.get(name)?.canvas.parentElement).filter(Boolean);
    if (figures.some((figure, i) => this.slot("cameras").children[i] !== figure)) this.slot("cameras").append(...figures);
  }

  showCameraRate(camera, ageS) {
    const now = performance.now();
    camera.capturedMs = now - 1000 * ageS;
    camera.times.push(now);
    while (camera.times[0] < now - RATES_OVER_MS) camera.times.shift();
    set(camera.rate, `${Math.round((camera.times.length * 1000) / RATES_OVER_MS)} fps`);
    this.showPictureAges();
  }

  // Canvases in the robot's order, for a headset.
  get pictures() {
    return [...this.slot("cameras").querySelectorAll("canvas")];
  }

  get words() {
    return [this.name, this.slot("badge").textContent, this.slot("note").textContent].filter(Boolean).join(" · ");
  }

  showPictureAges() {
    for (const { rate, capturedMs } of this.cameras.values()) {
      const ageMs = performance.now() - capturedMs;
      if (ageMs > OLD_MS) set(rate, `${(ageMs / 1000).toFixed(1)} s old`);
    }
  }
}

// The address of each camera's first picture in the robot's newest episode of the task, of a success if there is one.
async function startPictures(robot, task) {
  const get = async (path) => (await fetch(`/api/episodes${path}`)).json();
  try {
    const { episodes } = await get(`?robot=${encodeURIComponent(robot)}&task=${encodeURIComponent(task)}`);
    const kept = episodes.filter(({ deleted }) => !deleted);
    const episode = kept.find(({ success }) => success) ?? kept[0];
    if (!episode) return new Map();
    const { cameras } = await get(`/${episode.episode}`);
    const url = (name, step) => `/api/episodes/${episode.episode}/pictures/${encodeURIComponent(name)}/${step}`;
    return new Map(cameras.map(({ name, captured_step: steps }) => [name.split(".").pop(), url(name, steps.find((step) => step >= 0))]));
  } catch {
    return new Map(); // without a store there is none
  }
}

export function limitWords(limits) {
  return limits.map((limit) => LIMITS[limit] ?? limit.replace("_", " ")).join(", ");
}

function set(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}
