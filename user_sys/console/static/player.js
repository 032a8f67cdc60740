// Plays one episode: its video, phases and traces, step by step; and sends labels. Its single pictures are shown until the
// server has encoded the video, and by a browser that plays no H.264.

import { OTHER, PHASES, drawPhases, linePlot, removePlots } from "./plots.js";

const AHEAD = 20; // pictures that are fetched before they are shown

export class Player {
  constructor(episode, close, changed) {
    this.episode = episode;
    this.changed = changed;
    this.images = new Map();
    this.step = 0;
    this.node = document.getElementById("player").content.firstElementChild.cloneNode(true);
    this.node.setAttribute("aria-label", `Episode ${episode}`);
    this.slot("name").textContent = episode;
    const acts = { close, play: () => this.play(), back: () => this.move(-1), forward: () => this.move(1), delete: () => this.toggleDeleted() };
    Object.assign(acts, {
      demonstration: () => this.label({ demonstration: true }),
      keepFrom: () => this.label({ keep_from: this.step }),
      keepTo: () => this.label({ keep_to: this.step }),
      undo: () => this.label({ undo: true }),
    });
    for (const [name, act] of Object.entries(acts)) this.node.querySelector(`[data-act=${name}]`).addEventListener("click", act);
    for (const button of this.node.querySelectorAll("[data-success]")) {
      button.addEventListener("click", () => this.label({ success: button.dataset.success }));
    }
    for (const button of this.node.querySelectorAll("[data-export]")) {
      button.addEventListener("click", () => this.export(button.dataset.export));
    }
    this.slot("step").addEventListener("input", () => this.show(Number(this.slot("step").value)));
  }

  slot(name) {
    return this.node.querySelector(`[data-slot="${name}"]`);
  }

  url(path = "") {
    return `/api/episodes/${encodeURIComponent(this.episode)}${path}`;
  }

  async load() {
    const response = await fetch(this.url());
    if (!response.ok) return this.answer(await response.text());
    this.detail = await response.json();
    const { summary, sentence, cameras, phases, labels, kept } = this.detail;
    const outcome = summary.deleted ? "DELETED" : { true: "SUCCESS", false: "FAILURE", null: "UNKNOWN" }[summary.success];
    this.slot("outcome").textContent = outcome;
    this.slot("outcome").dataset.state = { SUCCESS: "policy", FAILURE: "stopped" }[outcome] ?? "waiting";
    this.slot("note").textContent = `${summary.robot} · ${sentence}${summary.complete ? "" : " · not complete"}`;
    this.node.querySelector("[data-act=delete]").textContent = summary.deleted ? "Restore" : "Delete";
    this.slot("step").max = Math.max(0, phases.length - 1);
    this.slot("labels").replaceChildren(...labels.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
    if (this.video) this.showCaptions();
    else this.slot("cameras").replaceChildren(...cameras.map((camera) => this.cameraFigure(camera)));
    this.node.querySelector("[data-act=undo]").disabled = !labels.length;
    this.showPhases(phases.map((phase, step) => (step < kept[0] || step > (kept[1] ?? step) ? "trimmed" : phase)));
    this.showTraces();
    this.show(Math.min(this.step, phases.length - 1));
    if (summary.complete && cameras.length && !this.waits) this.loadVideo();
  }

  // One frame for each step, of all cameras.
  loadVideo() {
    this.waits = true;
    const video = Object.assign(document.createElement("video"), { src: this.url("/video"), muted: true, playsInline: true });
    video.addEventListener("canplaythrough", () => {
      this.video = video;
      this.showCaptions();
      this.show(this.step);
      if (this.timer) video.play();
    }, { once: true });
  }

  showCaptions() {
    const figure = document.createElement("figure");
    figure.className = "film";
    for (const camera of this.detail.cameras) this.cameraFigure(camera);
    figure.append(this.video, ...this.detail.cameras.map(({ caption }) => caption));
    this.slot("cameras").replaceChildren(figure);
  }

  cameraFigure(camera) {
    const figure = document.createElement("figure");
    camera.label = camera.name.split(".").pop();
    camera.caption = document.createElement("figcaption");
    camera.figure = figure;
    figure.append(camera.caption);
    return figure;
  }

  show(step) {
    this.follow(step);
    if (this.video) this.video.currentTime = (this.step + 0.5) / this.detail.rate_hz;
  }

  // The newest picture of each camera at this step, with the step at which it was captured.
  follow(step) {
    this.step = Math.max(0, Math.min(step, this.detail.phases.length - 1));
    for (const camera of this.detail.cameras) {
      const captured = camera.captured_step[this.step];
      camera.caption.textContent = captured < 0 ? `${camera.label}: no picture yet` : `${camera.label} · step ${captured}`;
      if (this.video) continue;
      camera.figure.replaceChildren(...(captured < 0 ? [] : [this.fetched(camera, captured)]), camera.caption);
      for (const later of camera.captured_step.slice(this.step, this.step + AHEAD)) if (later >= 0) this.fetched(camera, later);
    }
    this.slot("step").value = this.step;
    this.slot("place").textContent = `step ${this.step} of ${this.detail.phases.length - 1} · ${this.detail.phases[this.step]}`;
    for (const plot of this.plots ?? []) plot.setCursor({ left: plot.valToPos(this.step, "x"), top: -10 }, false);
  }

  fetched(camera, step) {
    const url = this.url(`/pictures/${encodeURIComponent(camera.name)}/${step}`);
    const alt = `${camera.label} camera at step ${step}`;
    if (!this.images.has(url)) this.images.set(url, Object.assign(new Image(), { src: url, alt }));
    return this.images.get(url);
  }

  move(steps) {
    this.pause();
    this.show(this.step + steps);
  }

  play() {
    if (this.timer) return this.pause();
    if (this.step === this.detail.phases.length - 1) this.show(0);
    this.node.querySelector("[data-act=play]").textContent = "Pause";
    this.video?.play();
    this.timer = setInterval(() => {
      this.follow(this.video ? Math.floor(this.video.currentTime * this.detail.rate_hz) : this.step + 1);
      if (this.step === this.detail.phases.length - 1) this.pause();
    }, 1000 / this.detail.rate_hz);
  }

  pause() {
    const played = this.timer;
    clearInterval(played);
    this.timer = null;
    if (played && this.video) { // it may have come to its end before
      this.video.pause();
      this.show(this.step);
    }
    this.node.querySelector("[data-act=play]").textContent = "Play";
  }

  remove() {
    this.pause();
    removePlots(this.plots);
    this.plots = [];
    this.node.remove();
  }

  showPhases(phases) {
    drawPhases(this.slot("phases"), phases);
    this.slot("legend").replaceChildren(
      ...[...new Set(phases)].map((phase) => {
        const item = Object.assign(document.createElement("span"), { textContent: phase });
        item.style.setProperty("--colour", PHASES[phase] ?? OTHER);
        return item;
      }),
    );
  }

  // Fits the plots to the present width.
  showTraces() {
    if (!this.detail) return;
    removePlots(this.plots);
    const steps = this.detail.phases.map((_, step) => step);
    this.plots = this.detail.traces.map(({ title, curves }) => {
      const plot = linePlot(this.slot("traces"), title, Object.keys(curves), [steps, ...Object.values(curves)]);
      plot.over.addEventListener("click", () => this.move(plot.cursor.idx - this.step));
      return plot;
    });
  }

  toggleDeleted() {
    return this.label({ deleted: !this.detail.summary.deleted });
  }

  async label(change) {
    const result = await this.post("/label", change);
    if (!result) return;
    this.answer(result.stored ? "The label is stored." : "The label waits for the gateway, which will store it.");
    await this.load();
    this.changed();
  }

  async export(format) {
    this.answer("exporting …");
    const result = await this.post("/export", { format });
    if (result) this.answer(`exported to ${result.folder}`);
  }

  async post(path, content) {
    const person = sessionStorage.getItem("operator") || "console";
    const body = JSON.stringify({ person, ...content });
    const response = await fetch(this.url(path), { method: "POST", body }).catch(() => null);
    if (response?.ok) return response.json();
    this.answer(response ? await response.text() : "no reply from the run");
    return null;
  }

  answer(text) {
    this.slot("answer").textContent = text;
  }
}
