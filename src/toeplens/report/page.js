// Unpacks Vega and the charts, draws each chart when it comes into view in the page's colours and width, sorts tables,
// saves tables as CSV, and opens the folded part that a link points into.
(async () => {
  "use strict";
  const text = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };

  function unfold() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target.matches("tr, section")) target.querySelector("details")?.toggleAttribute("open", target.matches("tr"));
    target.scrollIntoView();
  }
  addEventListener("hashchange", unfold);

  // ---- tables
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  function sort(table, head, column) {
    const down = head.ariaSort !== "descending";
    table.querySelectorAll("[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
    head.ariaSort = down ? "descending" : "ascending";
    const number = (row) => parseFloat(value(row, column).replace("−", "-").replaceAll(",", ""));
    const compare = (a, b) => {
      const [x, y] = [number(a), number(b)];
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      const order = Number.isNaN(x) ? value(a, column).localeCompare(value(b, column), undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[table.tHead.rows.length - 1].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head, column));
      head.append(button);
    });
  }
  // as `toeplens tables` writes them: spanning cells repeated, names of groups before those of columns, no formulas
  const NUMBER = /^[-+]\.?\d[\d.,]*(?:[eE][-+]?\d+)?(?: ?%)?(?: [\p{L}\p{N}_(±[].*)?$/u;
  const toCsv = (cell) => {
    const text = cell === "–" ? "" : cell.replace(/−(?=[\d.])/g, "-");
    const safe = /^[=+\-@＝＋－＠]/.test(text) && !NUMBER.test(text) ? `'${text}` : text;
    return /[",]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  function expandSpans(section) {
    const grid = [...section.rows].map(() => []);
    [...section.rows].forEach((row, y) => {
      let x = 0;
      for (const cell of row.cells) {
        while (grid[y][x] !== undefined) x++;
        const text = cell.dataset.text ?? cell.textContent.trim().replace(/\s+/g, " ");
        for (const spanned of grid.slice(y, y + cell.rowSpan)) for (let dx = 0; dx < cell.colSpan; dx++) spanned[x + dx] = text;
      }
    });
    return grid;
  }
  for (const element of document.querySelectorAll(".scroll:not(:has(.ledger, .facts))")) {
    const button = document.createElement("button");
    button.className = "save";
    button.textContent = "Save as CSV";
    button.setAttribute("aria-label", `Save as CSV: ${element.ariaLabel}`);
    button.addEventListener("click", () => {
      const table = element.querySelector("table");
      const head = expandSpans(table.tHead);
      const names = head[0].map((_, x) => [...new Set(head.map((row) => row[x]).filter(Boolean))].join(": "));
      const rows = [names, ...expandSpans(table.tBodies[0])].map((row) => row.map(toCsv).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([rows.join("\r\n") + "\r\n"], { type: "text/csv" }));
      link.download = `${element.ariaLabel.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.csv`;
      link.click();
    });
    element.after(button);
  }

  // ---- charts
  const elements = [...document.querySelectorAll(".chart")];
  if (!elements.length) return unfold();
  const altTexts = new Map(elements.map((element) => [element, element.textContent]));
  let charts, themes;
  try {
    [charts, themes] = (await Promise.all([text("charts"), text("themes")])).map(JSON.parse);
    if (document.getElementById("vega")) {
      const script = document.createElement("script");
      script.textContent = await text("vega");
      document.head.append(script);
      script.remove(); // it has run; a saved copy of the page keeps the packed script
    }
    if (!window.vegaEmbed) throw new Error("vega is missing");
  } catch {
    return unfold(); // the figures' text alternatives stay
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const AXES = 62, PANEL = 190; // as in charts.py
  function fitToWidth(spec, width) {
    if (spec.spec && spec.columns) {
      const columns = Math.max(1, Math.min(spec.columns, Math.floor(width / (PANEL + AXES / 2))));
      const panel = Math.max(PANEL / 2, (width - (spec.usermeta?.axes ?? AXES)) / columns - AXES / 2);
      return { ...spec, columns, spec: { ...spec.spec, width: Math.round(panel) } };
    }
    for (const key of ["vconcat", "hconcat", "concat"]) {
      if (!spec[key]) continue;
      const share = key === "hconcat" ? width / spec[key].length : width;
      return { ...spec, [key]: spec[key].map((each) => fitToWidth(each, share)) };
    }
    return { ...spec, width: Math.round(width), autosize: { type: "fit-x", contains: "padding" } };
  }
  const drawn = new Map(); // width and theme of each drawn chart
  const busy = new Set();
  let printing = false;
  const drawState = (element) => `${element.clientWidth} ${dark.matches && !printing ? "dark" : "light"}`;
  async function draw(element) {
    if (busy.has(element)) return; // when it is drawn, the loop looks whether its width or theme has changed
    busy.add(element);
    for (let now = drawState(element); element.clientWidth && now !== drawn.get(element); now = drawState(element)) {
      drawn.set(element, now);
      await embed(element, element.clientWidth, themes[now.split(" ")[1]]);
    }
    busy.delete(element);
  }
  async function embed(element, width, theme) {
    const columns = Math.max(1, Math.floor(width / 150));
    const config = { ...theme, legend: { ...theme.legend, columns } };
    const spec = fitToWidth(charts[element.dataset.chart], width);
    const actions = { export: true, source: false, compiled: false, editor: false };
    const options = { mode: "vega-lite", renderer: "svg", ast: true, actions, config, downloadFileName: element.dataset.chart };
    try {
      await vegaEmbed(element, { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec }, options);
      const picture = element.querySelector("svg");
      picture.querySelectorAll("[role], [aria-roledescription]").forEach((each) => {
        for (const name of ["role", "aria-roledescription", "aria-label"]) each.removeAttribute(name);
      });
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", altTexts.get(element));
      element.querySelector("summary").setAttribute("aria-label", `Save chart ${element.dataset.chart}`);
      element.dataset.drawn = "";
    } catch (error) {
      console.error(error);
      element.textContent = altTexts.get(element);
    }
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "900px" });
  const redraw = () => [...drawn.keys()].forEach((element) => draw(element));
  elements.forEach((element) => watcher.observe(element));
  const queue = [...elements];
  const next = () => queue.length && draw(queue.shift()).then(() => setTimeout(next, 50)); // idle callbacks may never come
  setTimeout(next, 50);
  new ResizeObserver(redraw).observe(document.querySelector("main"));
  dark.addEventListener("change", redraw);
  let opened = [];
  addEventListener("beforeprint", () => {
    printing = true;
    opened = [...document.querySelectorAll("details:not([open]):has(.chart)")];
    opened.forEach((each) => { each.open = true; });
    elements.forEach((element) => draw(element));
  });
  addEventListener("afterprint", () => {
    printing = false;
    opened.forEach((each) => { each.open = false; });
    redraw();
  });
  unfold();
})();
