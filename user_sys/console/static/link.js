// The one WebSocket: JSON both ways, pictures as binary frames (u32 header length, JSON header, JPEG).

const RETRY_MIN_MS = 500;
const RETRY_MAX_MS = 5000;

export class Link {
  // `on` has one function a message type, and: open(), closed(reason), picture(header, blob) -> Promise.
  constructor(on) {
    this.on = on;
    this.retryMs = RETRY_MIN_MS;
    this.connect();
  }

  get open() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  send(message) {
    if (!this.open) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  connect() {
    this.socket = new WebSocket(`ws://${location.host}/ws`);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      this.retryMs = RETRY_MIN_MS;
      this.on.open();
    };
    this.socket.onmessage = (event) => this.take(event.data);
    this.socket.onclose = (event) => {
      this.on.closed(event.reason);
      setTimeout(() => this.connect(), this.retryMs);
      this.retryMs = Math.min(this.retryMs * 2, RETRY_MAX_MS);
    };
  }

  take(content) {
    if (typeof content === "string") {
      const message = JSON.parse(content);
      this.on[message.type](message);
      return;
    }
    const length = new DataView(content).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
    const jpeg = new Blob([new Uint8Array(content, 4 + length)], { type: "image/jpeg" });
    // Seen is said only once the picture stands on the page: the server then sends the newest.
    this.on.picture(header, jpeg).finally(() => this.send({ type: "seen", robot: header.robot, camera: header.camera }));
  }
}
