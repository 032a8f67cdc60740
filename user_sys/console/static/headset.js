// A headset (WebXR): its controller drives while the grip button is held, and a panel shows the cameras.
//
// The tool follows the controller's motion since the grip was pressed: forward is where the person looked then.

import { Panel } from "./panel.js";

// Of the mapping "xr-standard"; either controller.
const BUTTONS = { gripper: 0, clutch: 1, rewind: 3, hand: 4, stop: 5 };
const MODES = ["immersive-ar", "immersive-vr"];
const FOLLOW_S = 0.1; // time constant with which the tool follows
const JUMP_M = 0.2; // a longer motion in one frame is an error of the tracking
const LEVEL = 0.2; // a view that is this near to the vertical has no direction

export class Headset {
  // `on` has moved(), toggleGripper(), hand() to take over or hand back, stop(), show(text); toolSpeed() in m/s at a
  // share of 1; and look(), the canvases and the words for the panel.
  constructor(button, on) {
    this.button = button;
    this.on = on;
    this.presses = { gripper: on.toggleGripper, hand: on.hand, stop: on.stop };
    this.session = null;
    this.rewinds = false;
    this.heading = [0, -1];
    this.letGo();
    button.addEventListener("click", () => (this.session ? this.session.end() : this.start()));
    this.find();
  }

  async find() {
    const found = await Promise.all(MODES.map((mode) => navigator.xr?.isSessionSupported(mode).catch(() => false)));
    this.mode = MODES.find((_, n) => found[n]);
    this.button.hidden = !this.mode;
  }

  // A headset that is off the head, or shows a menu: the page sends no input, so the robot holds.
  get isAway() {
    return Boolean(this.session) && this.session.visibilityState !== "visible";
  }

  async start() {
    let session;
    try {
      session = await navigator.xr.requestSession(this.mode);
      this.panel = new Panel(session);
      this.space = await session.requestReferenceSpace("local");
    } catch (error) {
      session?.end();
      return this.on.show(`the headset cannot start: ${error.message}`);
    }
    this.session = session;
    this.down = new Set();
    this.letGo();
    session.addEventListener("end", () => this.end());
    session.addEventListener("visibilitychange", () => this.letGo());
    this.space.addEventListener("reset", () => this.letGo());
    session.requestAnimationFrame((_, frame) => this.onFrame(frame));
    this.button.textContent = "Leave the headset";
    this.on.show("headset: hold the grip and move · trigger: gripper · A, X: take over, hand back · B, Y: stop every robot · stick pressed: rewind");
  }

  end() {
    this.session = null;
    this.rewinds = false;
    this.letGo();
    this.button.textContent = "Drive with a headset";
    this.on.show("");
  }

  // The clutch opens, until the grip is pressed anew.
  letGo() {
    this.clutch = null;
    this.mustRelease = true;
    this.left = [0, 0, 0];
  }

  onFrame(frame) {
    if (!this.session) return;
    this.session.requestAnimationFrame((_, next) => this.onFrame(next));
    const viewer = frame.getViewerPose(this.space);
    if (viewer) this.panel.draw(viewer, this.on.look());
    const sources = [...this.session.inputSources].filter((source) => source.gamepad && source.gripSpace);
    const isDown = (source, name) => Boolean(source.gamepad.buttons[BUTTONS[name]]?.pressed);
    for (const source of sources) {
      for (const [name, act] of Object.entries(this.presses)) {
        const key = `${source.handedness} ${name}`;
        if (isDown(source, name) && !this.down.has(key)) act();
        this.down[isDown(source, name) ? "add" : "delete"](key);
      }
    }
    const rewound = this.rewinds;
    this.rewinds = sources.some((source) => isDown(source, "rewind"));
    if (this.rewinds && !rewound) this.on.moved();
    const held = sources.filter((source) => isDown(source, "clutch"));
    if (!held.length) this.mustRelease = false;
    if (!held.includes(this.clutch)) this.clutch = null;
    if (!this.mustRelease && held.length) this.follow(this.clutch ?? held[0], frame, viewer);
  }

  follow(source, frame, viewer) {
    const pose = frame.getPose(source.gripSpace, this.space);
    if (!pose || !viewer || pose.emulatedPosition) return this.letGo();
    const { x, y, z } = pose.transform.position;
    if (this.clutch !== source) {
      this.clutch = source;
      this.left = [0, 0, 0];
      this.heading = headingOf(viewer.transform.orientation) ?? this.heading;
      this.on.moved();
    } else {
      const step = [x - this.from[0], y - this.from[1], z - this.from[2]];
      if (Math.hypot(...step) > JUMP_M) return this.letGo();
      const [ahead, aside] = this.heading;
      this.left[0] += step[0] * ahead + step[2] * aside;
      this.left[1] += step[0] * aside - step[2] * ahead;
      this.left[2] += step[1];
    }
    this.from = [x, y, z];
  }

  // Shares forward, left and up, once for each sent input: what the tool lacks of the controller's motion.
  read() {
    const now = performance.now();
    const seconds = Math.min((now - (this.readMs ?? now)) / 1000, FOLLOW_S);
    this.readMs = now;
    if (!this.clutch) return [0, 0, 0];
    const speed = this.on.toolSpeed();
    const reach = Math.max(speed * FOLLOW_S, Math.hypot(...this.left)); // the robot limits the length of a step
    const shares = this.left.map((metres) => metres / reach);
    this.left = this.left.map((metres, i) => metres - shares[i] * speed * seconds);
    return shares;
  }
}

// The horizontal direction of a view, x and z; null if it looks straight up or down. WebXR: y is up, and a view looks along -z.
function headingOf({ x, y, z, w }) {
  const [ahead, aside] = [-2 * (x * z + w * y), 2 * (x * x + y * y) - 1];
  const length = Math.hypot(ahead, aside);
  return length < LEVEL ? null : [ahead / length, aside / length];
}
