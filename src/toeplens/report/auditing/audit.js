// Maps of heads (coloured by the selected column, with tooltips), and the table of heads: sort, filter, download.
(() => {
  "use strict";
  const { order, columns, sheets } = JSON.parse(document.getElementById("sheets").textContent);
  const byName = Object.fromEntries(columns.map((column) => [column.name, column]));
  const menu = document.getElementById("column");

  function told(value, digits) {
    if (value === null || value === undefined) return "–";
    const text = value.toFixed(digits);
    return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
  }

  function make(kind, text = "", name = "") {
    const made = document.createElement(kind);
    if (text !== "") made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  // ---- the maps

  const ROOM = 16; // up to this many heads, cells show their values
  const maps = [...document.querySelectorAll(".map")].map((grid) => {
    const sheet = sheets[grid.dataset.sheet];
    const place = sheet.places[grid.dataset.place];
    const at = new Map();
    sheet.place.forEach((which, row) => {
      if (which === Number(grid.dataset.place)) at.set(`${sheet.layer[row]} ${sheet.head[row]}`, row);
    });
    const count = place.layers.length;
    const height = count <= 14 ? 26 : count <= 32 ? 16 : 9;
    grid.style.setProperty("--heads", place.heads);
    grid.style.setProperty("--row", `${height}px`);
    grid.classList.toggle("fine", place.heads > 2 * ROOM);
    const across = place.heads <= ROOM ? 1 : place.heads <= 2 * ROOM ? 4 : 8;
    const down = Math.ceil(14 / height);
    const cells = [];
    grid.append(make("b"));
    for (let head = 0; head < place.heads; head++) grid.append(make("b", head % across ? "" : String(head + 1), "across"));
    place.layers.forEach((layer, index) => {
      grid.append(make("b", index % down ? "" : `L${layer + 1}`));
      for (let head = 0; head < place.heads; head++) {
        const row = at.get(`${layer} ${head}`);
        const cell = grid.appendChild(make(row === undefined ? "span" : "i"));
        if (row === undefined) continue;
        cell.dataset.row = row;
        cells.push([cell, row]);
      }
    });
    return { grid, sheet, cells, numbered: place.heads <= ROOM && height > 20 };
  });

  // whether a tone is dark
  function darkness() {
    const style = getComputedStyle(document.documentElement);
    const [low, mid, high] = ["low", "mid", "high"].map((end) =>
      style.getPropertyValue(`--heat-${end}`).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16) / 255));
    return (tone) => {
      const end = tone < 0 ? low : high;
      return saving.dark(mid.map((part, index) => part + Math.abs(tone) * (end[index] - part)));
    };
  }

  function paint() {
    const { name, about, digits } = byName[menu.value];
    document.getElementById("column-about").textContent = `${about}.`;
    const dark = darkness();
    for (const { sheet, cells, numbered } of maps) {
      const tones = sheet.tones[name];
      for (const [cell, row] of cells) {
        const tone = tones ? tones[row] : null;
        cell.className = tone === null ? "unknown" : `${tone < 0 ? "less" : ""}${dark(tone) ? " dark" : ""}`;
        cell.style.setProperty("--tone", `${100 * Math.abs(tone || 0)}%`);
        if (numbered) cell.textContent = tone === null || digits > 3 ? "" : short(sheet.values[name][row], digits);
      }
    }
    document.querySelectorAll(".ramp[data-sheet]").forEach((ramp) => {
      const ends = sheets[ramp.dataset.sheet].ends[name];
      ramp.hidden = !ends;
      if (!ends) return;
      ramp.classList.toggle("half", ends.half);
      ramp.firstElementChild.textContent = ends.low;
      ramp.lastElementChild.textContent = ends.high;
    });
  }

  // a number in two or three characters: .52, 17, 3.1
  function short(value, digits) {
    const size = Math.abs(value);
    const text = size >= 9.95 ? value.toFixed(0) : size >= 1 ? value.toFixed(1) : value.toFixed(Math.min(digits, 2));
    return Number(text) === 0 ? (size === 0 ? "0" : "·") : text.replace("0.", ".").replace("-", "−");
  }

  const tip = make("div", "", "tip");
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  let lit = null;

  function point(cell, x, y) {
    if (lit) lit.classList.remove("on");
    lit = cell;
    tip.hidden = !cell;
    if (!cell) return;
    cell.classList.add("on");
    const sheet = sheets[cell.parentElement.dataset.sheet];
    const row = Number(cell.dataset.row);
    const list = make("dl");
    for (const { name, title, digits } of columns) {
      if (!sheet.values[name]) continue;
      const chosen = name === menu.value ? "chosen" : "";
      list.append(make("dt", title, chosen), make("dd", told(sheet.values[name][row], digits), chosen));
    }
    tip.replaceChildren(make("b", sheets.length > 1 ? `${sheet.name}: ${sheet.titles[row]}` : sheet.titles[row]), list);
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - box.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.height - 4))}px`;
  }

  for (const { grid } of maps) {
    const over = (event) => point(event.target.closest("i"), event.clientX, event.clientY);
    grid.addEventListener("pointermove", over);
    grid.addEventListener("click", over);
    grid.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(null); });
  }
  document.addEventListener("click", (event) => { if (!event.target.closest(".map")) point(null); });
  addEventListener("scroll", () => point(null), { passive: true });

  // ---- the table of an audit's heads

  const FIRST = 25; // rows shown initially
  const OPERATIONS = {
    ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b,
    "<=": (a, b) => a <= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  };

  // a head's value in any column, as in the files; null if unknown
  function recorded(sheet, name, row) {
    if (name === "layer" || name === "head") return sheet[name][row];
    if (name === "side" || name === "kind") return sheet.places[sheet.place[row]][name];
    return sheet.values[name] ? sheet.values[name][row] : null;
  }

  // the same value as the page shows it: layers and heads are counted from 1
  function value(sheet, name, row) {
    const found = recorded(sheet, name, row);
    return name === "layer" || name === "head" ? found + 1 : found;
  }

  // parses filters such as "positional > 0.5 and side = encoder"; throws the part that is invalid
  function conditions(text) {
    return text.split(/\s+and\s+|[,;&]+/i).map((part) => part.trim()).filter(Boolean).map((part) => {
      const found = /^([a-z][a-z_ ]*?)\s*(>=|<=|!=|=|>|<)\s*(\S+)$/i.exec(part);
      const name = found && found[1].toLowerCase().replaceAll(" ", "_");
      if (!found || !order.includes(name)) throw part;
      const worded = name === "side" || name === "kind";
      const wanted = worded ? found[3].toLowerCase() : Number(found[3].replace("−", "-"));
      if (Number.isNaN(wanted) || (worded && !found[2].endsWith("="))) throw part;
      return { name, holds: OPERATIONS[found[2]], wanted };
    });
  }

  const save = (content, type, button) => saving.save(new Blob([content], { type }), button.dataset.file);

  function heads(table, sheet) {
    const form = document.getElementById("filter");
    const status = document.getElementById("shown");
    const more = document.getElementById("more");
    const several = sheet.places.length > 1;
    const names = columns.map((column) => column.name);
    const effects = names.filter((name) => name.startsWith("effect"));
    const shown = ["layer", "head", ...effects, ...names.filter((name) => !effects.includes(name))];
    let sorted = { name: byName.effect ? "effect" : "", down: true };
    let wanted = [];
    let all = false;
    let rows = [];

    const line = table.tHead.insertRow();
    const heading = make("th", several ? "attention, head" : "head");
    heading.scope = "col";
    line.append(heading);
    for (const name of shown) {
      const cell = make("th", "", "right");
      cell.scope = "col";
      cell.dataset.name = name;
      const button = make("button", byName[name] ? byName[name].title : name);
      button.type = "button";
      button.title = byName[name] ? byName[name].about : "counted from 1";
      button.addEventListener("click", () => {
        sorted = { name, down: sorted.name === name ? !sorted.down : Boolean(byName[name]) };
        draw();
      });
      cell.append(button);
      line.append(cell);
    }

    function select() {
      const { place, layer, where } = Object.fromEntries(new FormData(form));
      try {
        wanted = conditions(where);
        form.elements.where.removeAttribute("aria-invalid");
      } catch (part) {
        form.elements.where.setAttribute("aria-invalid", "true");
        status.textContent = `“${part}” is not a valid filter. Example: positional > 0.5 and layer < 3.`;
        return false;
      }
      rows = sheet.titles.map((_, row) => row).filter((row) =>
        (!place || sheet.place[row] === Number(place)) && (!layer || sheet.layer[row] === Number(layer)) &&
        wanted.every(({ name, holds, wanted: other }) => {
          const own = value(sheet, name, row);
          return own !== null && holds(own, other);
        }));
      if (sorted.name) {
        const sign = sorted.down ? -1 : 1;
        const key = rows.map((row) => [value(sheet, sorted.name, row), row]);
        key.sort(([a, i], [b, j]) => (a === null) - (b === null) || sign * (a - b) || i - j);
        rows = key.map(([, row]) => row);
      }
      return true;
    }

    function draw() {
      if (!select()) return;
      table.tHead.querySelectorAll("th[data-name]").forEach((cell) => {
        if (cell.dataset.name === sorted.name) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
      const some = all ? rows : rows.slice(0, FIRST);
      table.tBodies[0].replaceChildren(...some.map((row) => {
        const made = make("tr");
        const title = make("th", sheet.titles[row]);
        title.scope = "row";
        made.append(title, ...shown.map((name) => make("td", byName[name] ? told(value(sheet, name, row), byName[name].digits) : value(sheet, name, row), "right")));
        return made;
      }));
      const total = sheet.titles.length;
      status.textContent = `${rows.length === total ? `All ${total}` : `${rows.length} of ${total}`} heads${some.length < rows.length ? `; showing the first ${some.length}` : ""}.`;
      more.hidden = some.length === rows.length;
      more.textContent = `Show all ${rows.length}`;
    }

    function csv() {
      const quoted = (one) => (one === null ? "" : saving.quoted(String(one)));
      const lines = [order, ...rows.map((row) => order.map((name) => recorded(sheet, name, row)))];
      return `${lines.map((line) => line.map(quoted).join(",")).join("\n")}\n`;
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => { all = false; draw(); });
    more.addEventListener("click", () => { all = true; draw(); });
    document.getElementById("csv").addEventListener("click", (event) => save(csv(), "text/csv", event.target));
    draw();
  }

  // ---- the heads with the largest change; the third sheet is the difference of the two audits

  const CHANGED = 12;
  function changed(body) {
    const [first, second, change] = sheets;
    const { name, digits } = byName[menu.value];
    const values = change.values[name] || [];
    const rows = values.map((_, row) => row).filter((row) => values[row] !== null)
      .sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b).slice(0, CHANGED);
    body.replaceChildren(...rows.map((row) => {
      const made = make("tr");
      const title = make("th", change.titles[row]);
      title.scope = "row";
      made.append(title, ...[first, second, change].map((sheet) => make("td", told(sheet.values[name][row], digits), "right")));
      return made;
    }));
  }

  const parquet = document.getElementById("parquet");
  if (parquet) {
    parquet.addEventListener("click", () => {
      const text = atob(document.getElementById("parquet-bytes").textContent);
      save(Uint8Array.from(text, (letter) => letter.charCodeAt(0)), "application/vnd.apache.parquet", parquet);
    });
  }
  const table = document.getElementById("table");
  if (table) heads(table, sheets[0]);
  const changes = document.querySelector("#changes tbody");
  if (menu) {
    const show = () => {
      paint();
      if (changes) changed(changes);
    };
    menu.addEventListener("change", show);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    show();
  }
})();
