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
      node.setPointerCapture(event.pointerId);
      this.from = [event.clientX, event.clientY];
      this.moved("stick");
    });
    node.addEventListener("pointermove", (event) => {
      if (this.from) this.show((event.clientX - this.from[0]) / FULL_PX, (this.from[1] - event.clientY) / FULL_PX);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) node.addEventListener(end, () => this.letGo());
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

// The tilt of the device since its button was pressed. `shares` are right and up: aside and away from the person.
export class Tilt {
  // `fullDegrees()` is the tilt for the full share.
  constructor(button, fullDegrees, moved) {
    this.fullDegrees = fullDegrees;
    this.shares = [0, 0];
    this.held = false;
    button.addEventListener("pointerdown", async (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      this.held = true;
      this.from = null;
      moved("tilt");
      await DeviceOrientationEvent.requestPermission?.(); // of some phones
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(end, () => this.letGo());
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    window.addEventListener("deviceorientation", (event) => this.turn(event.beta, event.gamma));
  }

  turn(beta, gamma) {
    if (!this.held || beta === null || gamma === null) return;
    this.from ??= [beta, gamma];
    const [ahead, aside] = [this.from[0] - beta, gamma - this.from[1]].map((degrees) => degrees / this.fullDegrees());
    this.shares = [aside, ahead].map((share) => Math.max(-1, Math.min(1, share)));
  }

  letGo() {
    this.held = false;
    this.shares = [0, 0];
  }
}
