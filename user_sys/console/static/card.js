// One robot on the page: its cameras, its operator, and the buttons that apply now.

import { minutes } from "./chart.js";

const RATES_OVER_MS = 2000;
const OLD_MS = 750; // a picture of this age is labelled with it

export class Card {
  // `give(order)` sends an order to this robot; `choose()` selects it for the keyboard; `stops` has the unconfirmed
  // e-stops.
  constructor(name, give, choose, stops) {
    this.name = name;
    this.stops = stops;
    this.fresh = true;
    this.stoppedUntilMs = 0;
    this.cameras = new Map();
    this.node = document.getElementById("card").content.firstElementChild.cloneNode(true);
    this.node.setAttribute("aria-label", `Robot ${name}`);
    this.node.addEventListener("pointerdown", choose);
    this.slot("name").textContent = name;
    for (const button of this.node.querySelectorAll("[data-order]")) {
      button.addEventListener("click", () => give(button.dataset.order));
    }
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
    if (status) this.showFacts(status);
    if (robot.last) this.showLast(robot.last);
  }

  // `fresh`: the server replies. Otherwise the robot's state is unknown, and only a stop is offered.
  showFreshness(fresh) {
    this.fresh = fresh;
    if (!fresh) this.mine = this.heldMine = false;
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
    const state = status?.authority ?? "waiting";
    const driver = status?.operator === me ? "YOU" : status?.operator;
    const words = { policy: "POLICY", human: driver, hold: "HOLD", stopped: "STOPPED", waiting: "WAITING" };
    const notes = {
      hold: driver ? `held · last: ${driver}` : "held",
      stopped: driver ? `by ${driver} · re-arm to go on` : "re-arm to go on",
      waiting: `has not come in yet, for ${silent}`,
    };
    const note = lost ? `no word from this robot for ${silent}` : [notes[state], status?.note].filter(Boolean).join(" · ");
    this.badge(this.mine ? "you" : state, words[state] ?? state, note);
  }

  showButtons() {
    const state = this.fresh ? this.status?.authority : undefined;
    const others = state === "human" && !this.mine;
    const armed = Boolean(state) && state !== "stopped";
    this.button("take-over").disabled = !armed || others || this.mine;
    set(this.button("take-over"), this.heldMine ? "Resume" : "Take over");
    this.button("hand-back").disabled = !this.mine && state !== "hold";
    this.button("success").disabled = this.button("failure").disabled = !state || others;
    this.button("reset").disabled = !armed || others;
    this.button("re-arm").disabled = state !== "stopped";
    this.node.classList.toggle("stopped", state === "stopped");
    this.node.classList.toggle("mine", this.mine);
  }

  showFacts(status) {
    set(this.slot("step"), status.step);
    set(this.slot("phase"), status.phase);
    const version = status.policy_version;
    set(this.slot("version"), version === -2 ? "another run's" : version < 0 ? "none" : `v${version}`);
    set(this.slot("rate"), `${status.control_hz.toFixed(0)} Hz${status.real_time ? " · real time" : ""}`);
    this.slot("rate").title = status.refused_realtime;
    const dropped = status.dropped_episodes ? ` · ${status.dropped_episodes} episodes dropped` : "";
    set(this.slot("outbox"), `${status.outbox_chunks}${dropped}`);
    set(this.slot("safety"), status.safety_interventions);
    set(this.slot("episode"), status.episode);
  }

  // The outcome of the previous episode.
  showLast(last) {
    const end = last.success === null ? "cut off" : last.success ? "success" : "failure";
    const help = last.intervention_steps ? `, ${last.intervention_steps} by hand` : "";
    set(this.slot("last"), `${end} · ${last.steps} steps${help}`);
    this.slot("last").title = last.episode;
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
    this.showCameraRate(camera);
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
    const camera = { canvas, rate, times: [], shownMs: performance.now() };
    this.cameras.set(name, camera);
    return camera;
  }

  // Pictures come in any order; the robot's own order stays.
  orderCameras(names) {
    const figures = names.map((name) => this.cameras.get(name)?.canvas.parentElement).filter(Boolean);
    if (figures.some((figure, i) => this.slot("cameras").children[i] !== figure)) this.slot("cameras").append(...figures);
  }

  showCameraRate(camera) {
    const now = (camera.shownMs = performance.now());
    camera.times.push(now);
    while (camera.times[0] < now - RATES_OVER_MS) camera.times.shift();
    set(camera.rate, `${Math.round((camera.times.length * 1000) / RATES_OVER_MS)} fps`);
  }

  showPictureAges() {
    for (const { rate, shownMs } of this.cameras.values()) {
      const ageMs = performance.now() - shownMs;
      if (ageMs > OLD_MS) set(rate, `${(ageMs / 1000).toFixed(1)} s old`);
    }
  }
}

function set(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}
