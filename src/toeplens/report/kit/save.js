// Saves tables and figures as files; adds a button below each table that saves it as CSV (like `toeplens tables`).
const saving = {
  save(content, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(content);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  },

  button(text, about, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", about);
    made.addEventListener("click", act);
    return made;
  },

  row(...buttons) {
    const made = document.createElement("p");
    made.className = "save";
    made.append(...buttons);
    return made;
  },

  // a CSV cell
  quoted: (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text),

  // whether white has more contrast than black on a colour: relative luminance below the point of equal contrast
  dark(colour) {
    const [red, green, blue] = colour.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179;
  },

  // runs `act` with the light colour scheme, for print and pictures
  light(act) {
    const root = document.documentElement;
    const usual = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).filter((rule) => rule.selectorText === ":root");
    const set = usual.flatMap((rule) => [...rule.style].filter((name) => name.startsWith("--")).map((name) => [name, rule.style.getPropertyValue(name)]));
    set.forEach(([name, value]) => root.style.setProperty(name, value));
    try {
      return act((name) => getComputedStyle(root).getPropertyValue(name).trim());
    } finally {
      set.forEach(([name]) => root.style.removeProperty(name));
    }
  },
};

(() => {
  "use strict";
  document.querySelectorAll("p.save").forEach((old) => old.remove()); // buttons in a saved copy of the page

  const joined = (text) => text.replace(/\s+/g, " ").trim();

  // a cell's text with its small print in parentheses; an ASCII minus, so programs can parse numbers
  function told(cell) {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("[aria-hidden], sup, svg, button, select, details > :not(summary)").forEach((part) => part.remove());
    copy.querySelectorAll("br, p, li, dd, dt, div").forEach((part) => part.prepend(" "));
    copy.querySelectorAll("br").forEach((part) => part.replaceWith(" "));
    const notes = [...copy.querySelectorAll("small")].map((note) => {
      note.remove();
      return joined(note.textContent);
    });
    const [text, note] = [joined(copy.textContent), notes.filter(Boolean).join("; ")];
    const whole = text && note ? `${text} (${note})` : text || note;
    return whole === "–" ? "" : whole.replace(/−(?=[\d.])/g, "-");
  }

  // rows of equal length; a spanning cell is repeated
  function grid(table) {
    const rows = [...table.rows].map(() => []);
    [...table.rows].forEach((line, down) => {
      let across = 0;
      for (const cell of line.cells) {
        while (rows[down][across] !== undefined) across += 1;
        const text = told(cell);
        for (let y = down; y < Math.min(down + cell.rowSpan, rows.length); y += 1) {
          for (let x = across; x < across + cell.colSpan; x += 1) rows[y][x] = text;
        }
      }
    });
    const width = Math.max(...rows.map((row) => row.length));
    return rows.map((row) => Array.from({ length: width }, (_, across) => row[across] || ""));
  }

  // column names (with the group's name first), then the rows
  function csv(table) {
    const rows = grid(table);
    const heads = table.tHead ? table.tHead.rows.length : 0;
    const names = rows[0].map((_, across) =>
      heads ? [...new Set(rows.slice(0, heads).map((row) => row[across]).filter(Boolean))].join(": ") : String(across + 1));
    return [names, ...rows.slice(heads)].map((row) => `${row.map(saving.quoted).join(",")}\r\n`).join("");
  }

  document.querySelectorAll(".scroll[aria-label] > table").forEach((table) => {
    if (table.id === "table") return; // an audit's table of heads has its own button
    const name = table.parentElement.getAttribute("aria-label");
    const file = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
    const save = () => saving.save(new Blob([csv(table)], { type: "text/csv" }), `toeplens-${file}.csv`);
    table.parentElement.after(saving.row(saving.button("CSV", `Save the table “${name}” as CSV`, save)));
  });
})();
