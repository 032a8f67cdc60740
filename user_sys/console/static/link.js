// A WebSocket that reconnects, and measures the time since the server's last reply. JSON both ways; pictures as
// binary frames (u32 header length, JSON header, JPEG).

const RETRY_MIN_MS = 500;
const RETRY_MAX_MS = 5000;
const DEAD_MS = 3000; // a connection without a ping's reply for so long is closed
const STALE_MS = 750; // the page is outdated when the last reply is so old

export class Link {
  // `on` has one function a message type, and may have: open(), closed(reason), picture(header, blob) -> Promise.
  constructor(path, pingMs, on, retryMaxMs = RETRY_MAX_MS) {
    this.retryMaxMs = retryMaxMs;
    this.path = path;
    this.on = on;
    this.retryMs = RETRY_MIN_MS;
    this.repliedMs = performance.now();
    this.connect();
    setInterval(() => this.beat(), pingMs);
  }

  get open() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  get silentMs() {
    return performance.now() - this.repliedMs;
  }

  // The server has replied recently, so its state is current.
  get fresh() {
    return this.open && this.silentMs < STALE_MS;
  }

  send(message) {
    if (!this.open) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  // Timers of a hidden page may run once a minute: the time counts from the oldest ping without a reply.
  beat() {
    if (this.askedMs && performance.now() - this.askedMs > DEAD_MS) return this.renew();
    if (this.send({ type: "ping", sent_ms: performance.now() })) this.askedMs ||= performance.now();
  }

  renew() {
    const old = this.socket;
    old.onopen = old.onmessage = old.onclose = null;
    old.close();
    this.on.closed?.("no reply");
    this.connect();
  }

  connect() {
    this.askedMs = performance.now();
    this.socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${this.path}`);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      this.retryMs = RETRY_MIN_MS;
      this.askedMs = 0;
      this.on.open?.();
      this.beat();
    };
    this.socket.onmessage = (event) => this.take(event.data);
    this.socket.onclose = (event) => {
      this.askedMs = 0;
      this.on.closed?.(event.reason);
      setTimeout(() => this.connect(), this.retryMs);
      this.retryMs = Math.min(this.retryMs * 2, this.retryMaxMs);
    };
  }

  take(content) {
    if (typeof content === "string") {
      const message = JSON.parse(content);
      if (message.type === "pong") {
        this.repliedMs = performance.now();
        this.askedMs = 0;
      }
      this.on[message.type]?.(message);
      return;
    }
    const length = new DataView(content).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
    const jpeg = new Blob([new Uint8Array(content, 4 + length)], { type: "image/jpeg" });
    this.on.picture(header, jpeg);
  }
}
