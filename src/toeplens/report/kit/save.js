// Puts buttons beside figures, which save them as pictures, and below tables, which save them as CSV.
(() => {
  "use strict";
  const button = (text, about, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", about);
    made.addEventListener("click", act);
    return made;
  };
  const row = (...buttons) => {
    const made = document.createElement("p");
    made.className = "save";
    made.append(...buttons);
    return made;
  };

  document.querySelectorAll("figure[id^=figure-]").forEach((figure) => {
    const save = async (format) => {
      const drawn = [...figure.querySelectorAll(".plot")].filter((place) => place.offsetParent && place.querySelector(".main-svg"));
      for (const place of drawn) {
        const { width, height } = place.getBoundingClientRect();
        await Plotly.downloadImage(place, { format, filename: `toeplens-${place.id}`, width, height, scale: format === "png" ? 3 : 1 });
      }
    };
    const number = figure.querySelector("figcaption b").textContent.split(".")[0].toLowerCase();
    if (figure.querySelector(".plot")) {
      figure.append(row(...["svg", "png"].map((format) => button(format.toUpperCase(), `Save ${number} as ${format.toUpperCase()}`, () => save(format)))));
    }
  });

  // a cell that spans several stands in the first of them
  const told = (cell) => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("[aria-hidden], details > :not(summary)").forEach((part) => part.remove());
    copy.querySelectorAll("br").forEach((part) => part.replaceWith(" "));
    return copy.textContent.trim().replace(/\s+/g, " ");
  };
  const lines = (table) => {
    const grid = [];
    [...table.rows].forEach((line, down) => {
      grid[down] = grid[down] || [];
      let across = 0;
      for (const cell of line.cells) {
        while (grid[down][across] !== undefined) across += 1;
        for (let y = 0; y < cell.rowSpan; y += 1) {
          grid[down + y] = grid[down + y] || [];
          for (let x = 0; x < cell.colSpan; x += 1) grid[down + y][across + x] = x || y ? "" : told(cell);
        }
      }
    });
    return grid;
  };
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

  document.querySelectorAll(".scroll[aria-label] > table:not([id])").forEach((table) => {
    const name = table.parentElement.getAttribute("aria-label");
    const save = () => {
      const text = `${lines(table).map((line) => line.map(quoted).join(",")).join("\n")}\n`;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = `toeplens-${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    };
    table.parentElement.after(row(button("CSV", `Save the table "${name}" as CSV`, save)));
  });
})();
