// Input of a phone or tablet: two touch sticks, and the tilt of the device while its button is held.

const FULL_PX = 48; // from the centre of a stick to its full share

// A stick that returns to its centre. `shares` are right and up, in [-1, 1].
export class Stick {
  constructor(node, moved) {
    this.node = node;
    this.moved = moved;
    this.shares = [0, 0];
    this.knob = node.querySelector("i");
    node.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      if (this.from) return; // a second finger, such as the palm
      node.setPointerCapture(event.pointerId);
      this.finger = event.pointerId;
      this.from = [event.clientX, event.clientY];
      this.moved("stick");
    });
    node.addEventListener("pointermove", (event) => {
      if (!this.from || event.pointerId !== this.finger) return;
      this.show((event.clientX - this.from[0]) / FULL_PX, (this.from[1] - event.clientY) / FULL_PX);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      node.addEventListener(end, (event) => event.pointerId === this.finger && this.letGo());
    }
    node.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  show(right, up) {
    const length = Math.max(1, Math.hypot(right, up));
    this.shares = [right / length, up / length];
    this.knob.style.transform = `translate(${this.shares[0] * FULL_PX}px, ${-this.shares[1] * FULL_PX}px)`;
  }

  letGo() {
    this.from = null;
    this.show(0, 0);
  }
}

// `beta` and `gamma` of a device (W3C Device Orientation) as they would be if its natural orientation were that of the screen,
// which is turned by `angle`. All in degrees.
export function screenTilt(beta, gamma, angle) {
  const [b, g, a] = [beta, gamma, angle].map((degrees) => (degrees * Math.PI) / 180);
  const [x, y, z] = [-Math.cos(b) * Math.sin(g), Math.sin(b), Math.cos(b) * Math.cos(g)]; // the vertical, in the device's axes
  const right = x * Math.cos(a) - y * Math.sin(a);
  const up = x * Math.sin(a) + y * Math.cos(a);
  return [Math.atan2(up, Math.sign(z) * Math.hypot(right, z)), Math.atan(-right / z)].map((rad) => (rad * 180) / Math.PI);
}

// The tilt of the device since its button was pressed. `shares` are right and up: aside and away from the person.
export class Tilt {
  // `fullDegrees()` is the tilt for the full share.
  constructor(button, fullDegrees, moved) {
    this.fullDegrees = fullDegrees;
    this.shares = [0, 0];
    this.held = false;
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      this.held = true;
      this.from = null;
      moved("tilt");
    });
    // Some phones ask the person for permission, when a finger is lifted; the next press then has an effect.
    button.addEventListener("pointerup", () => window.DeviceOrientationEvent?.requestPermission?.().catch(() => {}));
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(end, () => this.letGo());
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    window.addEventListener("deviceorientation", (event) => this.turn(event.beta, event.gamma, screen.orientation?.angle ?? 0));
  }

  turn(beta, gamma, angle) {
    if (!this.held || beta === null || gamma === null) return;
    const now = [...screenTilt(beta, gamma, angle), angle];
    this.from ??= now;
    if (angle !== this.from[2]) return this.letGo(); // the picture turned
    const [ahead, aside] = [this.from[0] - now[0], now[1] - this.from[1]].map((degrees) => degrees / this.fullDegrees());
    this.shares = [aside, ahead].map((share) => Math.max(-1, Math.min(1, share)));
  }

  letGo() {
    this.held = false;
    this.shares = [0, 0];
  }
}
