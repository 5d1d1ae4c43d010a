/* Browsers start no worker from a page that is a local file. There, an iframe runs the script of the search. The plugin
   "offline" would take the same from another host, if no script of this name were there. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((ready) => {
        document.addEventListener("DOMContentLoaded", () => {
          document.body.appendChild(frame);
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = url;
          script.onload = () => ready(frame.contentWindow);
          frame.contentDocument.body.appendChild(script);
        });
      });
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
