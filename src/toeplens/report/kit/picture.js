// Adds buttons to each figure that save it as one picture: panels, titles, legend and colours, on white.
(() => {
  "use strict";
  const SCALE = 2; // PNG pixels per CSS pixel
  const MARGIN = 14;
  const WORDS = "figcaption, .views select, h4, h5, .legend, .ramp, .map";
  const DASHES = { dot: "2 3", dash: "6 4", dashdot: "6 3 2 3", longdash: "10 4", longdashdot: "10 3 2 3" };

  const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
  const element = (name, facts, inside = "") =>
    `<${name}${Object.entries(facts).map(([key, value]) => ` ${key}="${escaped(String(value))}"`).join("")}>${inside}</${name}>`;

  // red, green and blue of a CSS colour, from 0 to 1; null if transparent
  function parts(colour) {
    const numbers = (colour.match(/-?[\d.]+(?:e-?\d+)?/g) || []).map(Number);
    if (numbers.length < 3 || numbers[3] === 0) return null;
    return colour.startsWith("color(") ? numbers.slice(0, 3) : numbers.slice(0, 3).map((part) => part / 255);
  }
  const written = (colour) => `rgb(${colour.map((part) => Math.round(255 * part)).join(",")})`;

  // the lines of a text as they are wrapped on the page
  function lines(node) {
    const range = document.createRange();
    const found = [];
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const box = range.getBoundingClientRect();
      if (!box.width) continue;
      const last = found.at(-1);
      if (last && Math.abs(last.box.top - box.top) < 2) last.text += ` ${word[0]}`;
      else found.push({ text: word[0], box });
    }
    return found;
  }

  function texts(holder, at) {
    const walker = document.createTreeWalker(holder, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
      const parent = walker.currentNode.parentElement;
      if (parent.closest(".anchor, [aria-pressed=false], option")) continue;
      const style = getComputedStyle(parent);
      const ground = parent.closest(".map") && parts(style.backgroundColor);
      const ink = ground ? [0, 0, 0].fill(saving.dark(ground) ? 1 : 0) : parts(style.color) || [0, 0, 0];
      for (const { text, box } of lines(walker.currentNode)) {
        const size = parseFloat(style.fontSize);
        const [x, y] = at(box.left, (box.top + box.bottom) / 2 + 0.35 * size);
        found.push(element("text", { x, y, "font-size": size, "font-weight": style.fontWeight, fill: written(ink) }, escaped(text)));
      }
    }
    return found;
  }

  function shapes(figure, at, style) {
    const found = [];
    for (const mark of figure.querySelectorAll(".legend .stroke, .ramp i, .map i, .map span")) {
      const box = mark.getBoundingClientRect();
      if (!box.width || mark.closest("[aria-pressed=false]")) continue;
      const [x, y] = at(box.left, box.top);
      const size = { width: box.width, height: box.height };
      if (mark.matches(".stroke")) {
        const dash = DASHES[[...mark.classList].find((name) => name in DASHES)];
        const line = { x1: x, x2: x + box.width, y1: y + 1.5, y2: y + 1.5, stroke: written(parts(getComputedStyle(mark).borderTopColor)), "stroke-width": 2.5 };
        found.push(element("line", dash ? { ...line, "stroke-dasharray": dash } : line));
      } else if (mark.matches(".ramp i")) {
        const tones = mark.parentElement.matches(".half") ? ["mid", "high"] : ["low", "mid", "high"];
        const id = `ramp-${found.length}`;
        const stops = tones.map((tone, place) => element("stop", { offset: place / (tones.length - 1), "stop-color": style(`--heat-${tone}`) }));
        found.push(element("linearGradient", { id }, stops.join("")), element("rect", { x, y, ...size, fill: `url(#${id})` }));
      } else {
        const ground = parts(getComputedStyle(mark).backgroundColor);
        found.push(element("rect", { x, y, ...size, fill: ground ? written(ground) : "none", stroke: ground ? "none" : style("--line") }));
      }
    }
    return found;
  }

  // a plot in the light colour scheme
  function recoloured(place, style) {
    const layout = JSON.parse(JSON.stringify(place.layout));
    layout.font.color = style("--ink-2");
    if (layout.coloraxis) {
      layout.coloraxis.colorscale = ["low", "mid", "high"].map((end, step) => [step / 2, style(`--heat-${end}`)]);
    }
    return { data: place.data, layout };
  }

  async function picture(figure) {
    const frame = figure.getBoundingClientRect();
    const at = (x, y) => [x - frame.left + MARGIN, y - frame.top + MARGIN];
    let bottom = 0;
    const { drawn, ground, plots } = saving.light((style) => {
      const holders = [...figure.querySelectorAll(WORDS)].filter((holder) => holder.offsetParent);
      const places = [...figure.querySelectorAll(".plot")].filter((place) => place.offsetParent && place.querySelector(".main-svg"));
      for (const each of [...holders, ...places]) bottom = Math.max(bottom, each.getBoundingClientRect().bottom - frame.top);
      const chosen = holders.filter((holder) => holder.matches("select")).map((menu) => {
        const box = menu.parentElement.getBoundingClientRect();
        const [x, y] = at(box.left, box.bottom - 8);
        return element("text", { x, y, "font-size": 14, "font-weight": 600, fill: style("--ink") }, escaped(menu.selectedOptions[0].textContent));
      });
      return {
        drawn: [...shapes(figure, at, style), ...holders.filter((holder) => !holder.matches("select")).flatMap((holder) => texts(holder, at)), ...chosen],
        ground: style("--ground"),
        plots: places.map((place) => ({ box: place.getBoundingClientRect(), plot: recoloured(place, style) })),
      };
    });
    for (const { box, plot } of plots) {
      const size = { width: Math.round(box.width), height: Math.round(box.height) };
      const svg = await Plotly.toImage(plot, { format: "svg", imageDataOnly: true, ...size });
      const [x, y] = at(box.left, box.top);
      drawn.push(element("g", { transform: `translate(${x} ${y})` }, svg));
    }
    const width = Math.ceil(frame.width + 2 * MARGIN);
    const height = Math.ceil(bottom + 2 * MARGIN);
    const back = element("rect", { width, height, fill: ground });
    const facts = { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, 'DejaVu Sans', Arial, sans-serif" };
    return { svg: element("svg", facts, back + drawn.join("")), width, height };
  }

  async function painted({ svg, width, height }) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [SCALE * width, SCALE * height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => { canvas.toBlob(done, "image/png"); });
  }

  // name of the figure and, if there is a menu, the selected view or column
  function name(figure) {
    const menu = figure.querySelector(".views select");
    const [plot] = figure.querySelectorAll(".plot");
    const id = figure.id.replace(/^figure-/, "") || plot.id.replace(/(-\d+){3}$/, "");
    return `${id}${menu ? `-${menu.dataset.views ? Number(menu.value) + 1 : menu.value}` : ""}`;
  }

  document.querySelectorAll("figure").forEach((figure) => {
    if (!figure.querySelector(window.Plotly ? ".plot, .map" : ".map")) return;
    const title = figure.querySelector("figcaption b");
    const called = title ? title.textContent.split(".")[0].toLowerCase() : "the figure";
    figure.append(saving.row(...["svg", "png"].map((format) => saving.button(format.toUpperCase(), `Save ${called} as ${format.toUpperCase()}`, async () => {
      const made = await picture(figure);
      saving.save(format === "png" ? await painted(made) : new Blob([made.svg], { type: "image/svg+xml" }), `toeplens-${name(figure)}.${format}`);
    }))));
  });
})();
