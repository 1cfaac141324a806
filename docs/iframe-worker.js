// Search from a file system: browsers start no workers there, so the search worker runs in a hidden frame of the page.
// (The plugin `offline` of Material would fetch such a script from another host.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const element = scope.document.createElement("script");
          element.src = script;
          element.addEventListener("load", () => resolve(scope));
          scope.document.body.append(element);
        }, { once: true });
      });
      frame.srcdoc = "<!doctype html><body></body>";
      (document.body || document.documentElement).append(frame);
    }

    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
  };
}
