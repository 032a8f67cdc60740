// Input: keys, touch buttons and sticks, tilt, a gamepad and a headset, as shares along x, y, z, and a gripper state that stays.

import { Pad } from "./gamepad.js";
import { Stick, Tilt } from "./touch.js";

const MOVES = {
  KeyW: [1, 0, 0],
  KeyS: [-1, 0, 0],
  KeyA: [0, 1, 0],
  KeyD: [0, -1, 0],
  KeyR: [0, 0, 1],
  KeyF: [0, 0, -1],
};
const SLOW = 0.3;
// Quarter turns of the person around the robot; degrees for full speed; the gamepad's stick that moves; share of speed.
const SETTINGS = { view: "0", tilt: "30", stick: "left", speed: "60" };

export class Hand {
  // `moved(code)` is called when a key or button is pressed, `changed()` also when one is released. `stepJoint(by)` selects
  // another joint; the keys `reserved` cannot move the robot. `headset`: a `Headset`.
  constructor(moved, changed, stepJoint, reserved, headset) {
    this.moved = moved;
    this.headset = headset;
    this.changed = changed;
    this.reserved = reserved;
    this.down = new Set();
    this.slow = false;
    this.gripper = 0;
    this.pad = new Pad(() => this.moved("KeyG"), () => this.moved("gamepad"), stepJoint, () => this.settings.stick === "right");
    const el = (id) => document.getElementById(id);
    this.sticks = ["stick-plane", "stick-height"].map((id) => new Stick(el(id), moved));
    this.tilt = new Tilt(el("tilt"), () => Number(this.settings.tilt), moved);
    this.settings = { keys: {}, ...SETTINGS, ...JSON.parse(localStorage.getItem("input") ?? "{}") };
    for (const name of Object.keys(SETTINGS)) this.wireSetting(name, el(name === "speed" ? name : `input-${name}`));
    this.buttons = new Map();
    for (const button of document.querySelectorAll("#pad [data-code]")) this.wire(button);
    el("input-keys").addEventListener("click", () => this.rebind(this.rebinds ? null : "any"));
    el("input-default").addEventListener("click", () => this.setKeys({}));
    this.showKeys();
  }

  save() {
    localStorage.setItem("input", JSON.stringify(this.settings));
  }

  // What the next click on a button or the next key is for: null drives, "any" chooses a movement, a code sets its key.
  rebind(rebinds) {
    this.rebinds = rebinds;
    const words = { any: "click a movement above" }[rebinds] ?? (rebinds ? `press the key for ${this.buttons.get(rebinds).lastChild.textContent}` : "");
    document.getElementById("input-hint").textContent = words;
  }

  // `keys`: the key of each movement that has another one than its own code.
  setKeys(keys) {
    this.letGo(); // a key that is held may have another movement now
    this.settings.keys = keys;
    this.save();
    this.showKeys();
    this.rebind(null);
  }

  showKeys() {
    for (const [code, button] of this.buttons) button.querySelector("kbd").textContent = keyName(this.settings.keys[code] ?? code);
  }

  // The movement of a key, by its code.
  movement(key) {
    const { keys } = this.settings;
    return [...this.buttons.keys()].find((code) => (keys[code] ?? code) === key);
  }

  // Whether the page uses the key: it moves the robot, or becomes the key of the movement that was chosen. `repeats`: the
  // key is held, which presses no movement anew.
  pressKey(key, repeats) {
    if (this.rebinds && this.rebinds !== "any" && !this.reserved.has(key)) {
      const other = this.movement(key);
      const old = this.settings.keys[this.rebinds] ?? this.rebinds;
      this.setKeys({ ...this.settings.keys, ...(other && { [other]: old }), [this.rebinds]: key });
      return true;
    }
    return repeats ? this.movement(key) !== undefined : this.press(this.movement(key));
  }

  releaseKey(key) {
    this.release(this.movement(key));
  }

  // Settings are kept in this browser.
  wireSetting(name, control) {
    control.value = this.settings[name];
    control.addEventListener("change", () => {
      this.settings[name] = control.value;
      this.save();
    });
  }

  wire(button) {
    const code = button.dataset.code;
    this.buttons.set(code, button);
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // no focus, no text selection, no long-press menu
      if (this.rebinds) return this.rebind(code);
      button.setPointerCapture(event.pointerId);
      this.press(code);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(end, () => this.release(code));
    }
    button.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  // Whether `code` is a movement of the page.
  press(code) {
    if (!this.buttons.has(code)) return false;
    if (this.down.has(code)) return true;
    this.down.add(code);
    this.buttons.get(code).classList.add("lit");
    this.moved(code);
    this.changed();
    return true;
  }

  release(code) {
    if (!this.down.delete(code)) return;
    this.buttons.get(code).classList.remove("lit");
    this.changed();
  }

  letGo() {
    for (const code of [...this.down]) this.release(code);
    for (const device of [...this.sticks, this.tilt, this.headset]) device.letGo();
    this.slow = false;
  }

  // Unknown becomes closed, then open and closed in turn.
  toggleGripper() {
    this.setGripper(this.gripper === -1 ? 1 : -1);
  }

  setGripper(gripper) {
    this.gripper = gripper;
    document.getElementById("grip").textContent = { "-1": "gripper closed", 0: "gripper", 1: "gripper open" }[gripper];
  }

  get rewinds() {
    return this.down.has("KeyB") || this.pad.rewinds || this.headset.rewinds;
  }

  // Share of the full speed that an input at its end has.
  get scale() {
    return (Number(document.getElementById("speed").value) / 100) * (this.slow ? SLOW : 1);
  }

  // Call it once for each sent input. The shares of a joint are not turned.
  move(movesJoint) {
    const headset = this.headset.read();
    const total = this.pad.shares.map((share, i) => share + headset[i]);
    for (const code of this.down) (MOVES[code] ?? total.map(() => 0)).forEach((share, i) => (total[i] += share));
    const [plane, height] = this.sticks.map((stick) => stick.shares);
    const added = [plane[1] + this.tilt.shares[1], -plane[0] - this.tilt.shares[0], height[1]];
    const sum = total.map((share, i) => share + added[i]);
    const longest = Math.max(1, movesJoint ? Math.abs(sum[0]) : Math.hypot(...sum)); // as fast aslant as straight ahead
    const shares = sum.map((share) => (share / longest) * this.scale);
    return movesJoint ? shares : turned(shares, Number(this.settings.view));
  }
}

// A key as it is printed on keyboards.
function keyName(code) {
  const arrows = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→" };
  return arrows[code] ?? code.replace(/^(Key|Digit)/, "").replace(/^Numpad/, "num ");
}

// Shares as the person sees them, who stands `quarters` turns to the left of the place behind the robot.
function turned([ahead, left, up], quarters) {
  for (let n = 0; n < quarters; n++) [ahead, left] = [left, -ahead];
  return [ahead, left, up];
}
