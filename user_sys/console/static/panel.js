// The panel that a headset shows: camera pictures side by side and a line of words, on a rectangle in front of the person.

const [WIDTH, HEIGHT, LINE] = [1024, 512, 56]; // pixels
const DRAW_MS = 66;
const VERTICES = `
  attribute vec2 corner; uniform mat4 projection, view; uniform float height; varying vec2 place;
  void main() {
    place = vec2(corner.x, -corner.y) * 0.5 + 0.5;
    gl_Position = projection * view * vec4(corner * vec2(0.8, 0.4) + vec2(0.0, height), -1.5, 1.0);
  }`;
const PIXELS = `
  precision mediump float; uniform sampler2D picture; varying vec2 place;
  void main() { gl_FragColor = texture2D(picture, place); }`;

export class Panel {
  // Raises an Error without WebGL. Above the line of sight if the person sees the room.
  constructor(session) {
    this.session = session;
    this.page = Object.assign(document.createElement("canvas"), { width: WIDTH, height: HEIGHT });
    this.drawnMs = -DRAW_MS;
    const gl = (this.gl = document.createElement("canvas").getContext("webgl", { xrCompatible: true }));
    if (!gl) throw new Error("this browser has no WebGL");
    session.updateRenderState({ baseLayer: new XRWebGLLayer(session, gl) });
    this.program = gl.createProgram();
    for (const [kind, text] of [[gl.VERTEX_SHADER, VERTICES], [gl.FRAGMENT_SHADER, PIXELS]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      gl.attachShader(this.program, shader);
    }
    gl.linkProgram(this.program);
    gl.useProgram(this.program);
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ARRAY_BUFFER, new Float32Array([-1, -1, 1, -1, -1, 1, 1, 1]), gl.STATIC_DRAW);
    const corner = gl.getAttribLocation(this.program, "corner");
    gl.enableVertexAttribArray(corner);
    gl.vertexAttribPointer(corner, 2, gl.FLOAT, false, 0, 0);
    gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
    for (const side of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) gl.texParameteri(gl.TEXTURE_2D, side, gl.CLAMP_TO_EDGE);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, gl.LINEAR);
    const seesRoom = ![undefined, "opaque"].includes(session.environmentBlendMode);
    gl.uniform1f(gl.getUniformLocation(this.program, "height"), seesRoom ? 0.6 : 0);
  }

  // `viewer`: its pose in this frame. `look`: the canvases of cameras, the words, and whether they warn.
  draw(viewer, look) {
    const { gl, program } = this;
    if (performance.now() - this.drawnMs > DRAW_MS) this.paint(look);
    const layer = this.session.renderState.baseLayer;
    gl.bindFramebuffer(gl.FRAMEBUFFER, layer.framebuffer);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    for (const view of viewer.views) {
      const { x, y, width, height } = layer.getViewport(view);
      gl.viewport(x, y, width, height);
      gl.uniformMatrix4fv(gl.getUniformLocation(program, "projection"), false, view.projectionMatrix);
      gl.uniformMatrix4fv(gl.getUniformLocation(program, "view"), false, view.transform.inverse.matrix);
      gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4);
    }
  }

  paint({ pictures, words, warns }) {
    this.drawnMs = performance.now();
    const pen = this.page.getContext("2d");
    pen.fillStyle = "#14171c";
    pen.fillRect(0, 0, WIDTH, HEIGHT);
    pictures.forEach((picture, n) => {
      const wide = WIDTH / pictures.length;
      const scale = Math.min(wide / picture.width, (HEIGHT - LINE) / picture.height);
      pen.drawImage(picture, n * wide, LINE, picture.width * scale, picture.height * scale);
    });
    pen.fillStyle = warns ? "#ff7a7a" : "#ffffff";
    pen.font = "32px sans-serif";
    pen.fillText(words, 12, 40, WIDTH - 24);
    this.gl.texImage2D(this.gl.TEXTURE_2D, 0, this.gl.RGBA, this.gl.RGBA, this.gl.UNSIGNED_BYTE, this.page);
  }
}
