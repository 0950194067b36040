// A page that was opened from a folder may start no Worker. This class runs the worker's script, which the search
// is, in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.onload = () => {
        const page = frame.contentWindow
        page.importScripts = (...urls) => Promise.all(urls.map((one) => load(page, one)))
        page.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        load(page, url).then(() => {
          this.postMessage = (data) => page.dispatchEvent(new page.MessageEvent("message", { data }))
          this.waiting.forEach(this.postMessage)
        })
      }
      frame.srcdoc = "<!doctype html>"
      document.body.append(frame)
    }
    postMessage(data) {
      this.waiting.push(data)
    }
  }

function load(page, url) {
  return new Promise((done) => {
    const script = page.document.createElement("script")
    script.src = url
    script.onload = done
    page.document.body.append(script)
  })
}
