// Starts the page.

find("legend").append(...legendRows.map(({ row }) => row).reverse());
const timeline = new Timeline(find("chart"));
const overlay = data.planned ? new Overlay(find("overlay")) : null;

function paint() {
  paintLegend();
  timeline.draw();
  if (overlay) overlay.draw();
}

function showTheme() {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && darkness.matches);
  find("theme").textContent = isDark ? "Light colours" : "Dark colours";
  find("theme").dataset.next = isDark ? "light" : "dark";
  paint();
}

const darkness = matchMedia("(prefers-color-scheme: dark)");
darkness.addEventListener("change", showTheme);
find("theme").hidden = false;
find("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = find("theme").dataset.next;
  showTheme();
});
find("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
find("zoom-out").addEventListener("click", () => timeline.zoom(2));
find("zoom-all").addEventListener("click", () => timeline.zoom(Infinity));
find("to-peak").addEventListener("click", () => timeline.move(data.peak));
if (find("graph-peak")) {
  find("graph-peak").addEventListener("click", () => {
    const texts = [...document.querySelectorAll(".picture text")];
    const peak = texts.find((text) => /^PEAK( within)?: \d/.test(text.textContent));
    (peak || texts[0]).scrollIntoView({ block: "center", inline: "center" });
  });
}
find("steps").addEventListener("toggle", fillSteps, { once: true });

showTheme();
timeline.move(data.peak);
if (overlay) overlay.move(overlay.peak);
new LiveTable(find("live"));
new ModuleTree(find("tree"));
if (find("curve")) drawCurve(find("curve"));
