// The theme restores the place of the left list from the page before. Show the current page if it is out of view.
window.addEventListener("load", () => {
  const list = document.querySelector(".bd-sidebar-primary");
  const current = [...document.querySelectorAll(".bd-sidebar-primary .bd-links li.current > a")].pop();
  if (!list || !current) return;
  const [outer, inner] = [list.getBoundingClientRect(), current.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) {
    list.scrollTop += inner.top - outer.top - list.clientHeight / 3;
  }
});
