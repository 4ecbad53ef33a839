// Unpacks plotly and the figures; draws each plot when it comes near the viewport or when idle, in the page's colours;
// toggles views and legend entries.
(() => {
  "use strict";
  const unpacked = (element) =>
    pako.inflate(Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0)), { to: "string" });
  const program = document.getElementById("plotly");
  if (program) {
    const script = document.createElement("script");
    script.textContent = unpacked(program);
    document.head.append(script);
    script.remove(); // it has run; a saved copy of the page keeps the packed script
  }
  const places = [...document.querySelectorAll(".plot")];
  if (!window.Plotly) {
    const said = document.createElement("p");
    said.className = "banner";
    said.textContent = `The figures are described in words: ${program ? "this browser cannot run plotly" : "plotly.js is missing next to this page"}.`;
    document.querySelector("main").prepend(said);
    places.forEach((place) => {
      place.textContent = place.getAttribute("aria-label");
      place.style.height = "auto";
    });
    return;
  }
  const plots = JSON.parse(unpacked(document.getElementById("figures")));
  const config = { displayModeBar: false, responsive: true };
  const drawn = new Set();

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function theme(layout) {
    layout.font.color = style("--ink-2");
    layout.hoverlabel = { bgcolor: style("--panel"), bordercolor: style("--line"), font: { color: style("--ink") }, align: "left" };
    if (layout.coloraxis) {
      layout.coloraxis.colorscale = [[0, style("--heat-low")], [0.5, style("--heat-mid")], [1, style("--heat-high")]];
    }
    return layout;
  }

  function hidden(place) {
    const legend = place.closest("figure").querySelector(".legend");
    if (!legend) return new Set();
    return new Set([...legend.querySelectorAll('[aria-pressed="false"]')].map((entry) => entry.dataset.key));
  }

  function draw(place) {
    if (drawn.has(place.id)) return;
    drawn.add(place.id);
    const plot = plots[place.id];
    const off = hidden(place);
    for (const trace of plot.data) if (trace.meta) trace.visible = !off.has(trace.meta);
    Plotly.newPlot(place, plot.data, theme(plot.layout), config);
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "900px 0px" });
  places.forEach((place) => watcher.observe(place));

  // a page is printed, saved or photographed whole, whether or not somebody has scrolled through it
  const idle = window.requestIdleCallback || ((call) => setTimeout(call, 50));
  const visible = () => places.filter((place) => !drawn.has(place.id) && place.offsetParent);
  const rest = () => {
    const [next] = visible();
    if (!next) return;
    watcher.unobserve(next);
    draw(next);
    idle(rest);
  };
  addEventListener("load", () => idle(rest));
  document.addEventListener("toggle", () => idle(rest), true);
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details.figures:not([open])")];
    unfolded.forEach((details) => { details.open = true; });
    saving.light(() => {
      if (dark.matches) redraw();
      visible().forEach(draw);
    });
  });
  addEventListener("afterprint", () => {
    unfolded.forEach((details) => { details.open = false; });
    if (dark.matches) redraw();
  });

  document.querySelectorAll("select[data-views]").forEach((menu) => {
    const show = () => {
      const views = menu.closest("figure").querySelectorAll(".view");
      views.forEach((view, index) => { view.hidden = index !== Number(menu.value); });
      window.dispatchEvent(new Event("resize"));
      if (document.readyState === "complete") idle(rest);
    };
    menu.addEventListener("change", show);
    show();
  });

  document.querySelectorAll(".legend button").forEach((entry) => {
    entry.addEventListener("click", () => {
      const on = entry.getAttribute("aria-pressed") !== "true";
      entry.setAttribute("aria-pressed", String(on));
      entry.closest("figure").querySelectorAll(".plot").forEach((place) => {
        if (!drawn.has(place.id)) return;
        const which = plots[place.id].data.flatMap((trace, index) => (trace.meta === entry.dataset.key ? [index] : []));
        if (which.length) Plotly.restyle(place, { visible: on }, which);
      });
    });
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => {
    for (const place of places) {
      if (drawn.has(place.id)) Plotly.react(place, plots[place.id].data, theme(plots[place.id].layout), config);
    }
  };
  dark.addEventListener("change", redraw);

  const reveal = () => {
    const aim = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = aim && aim.querySelector("details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
