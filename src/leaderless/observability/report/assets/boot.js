// Runs first, so that a fault in any later script is seen by the reader and not only in the console.
"use strict";
{
  const root = document.documentElement;
  const report = (message) => {
    root.dataset.error = root.dataset.error ? `${root.dataset.error}; ${message}` : message;
    const show = () => {
      const place = document.getElementById("script-error");
      place.textContent = `Part of this page could not be drawn: ${root.dataset.error}`;
      place.hidden = false;
    };
    if (document.readyState === "loading") {
      document.addEventListener("DOMContentLoaded", show, { once: true });
    } else {
      show();
    }
  };
  addEventListener("error", (event) => report(event.message));
  addEventListener("unhandledrejection", (event) => report(String(event.reason)));
  addEventListener("securitypolicyviolation", (event) => {
    root.dataset.blocked = `${event.violatedDirective} ${event.blockedURI}`;
  });
}
