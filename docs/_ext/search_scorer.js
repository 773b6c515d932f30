// The weights of Sphinx's search. Sections whose title is the query come first, then titles with most of its words.
const queryWords = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
const shareInTitle = (title) => {
  const words = title.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const found = queryWords.filter((queryWord) => words.some((word) => word.startsWith(queryWord)));
  return found.length / Math.max(1, queryWords.length);
};
var Scorer = {
  score: ([_docname, title, _anchor, _descr, score, _filename, kind]) =>
    score + (kind === "title" ? 40 : 0) + 20 * shareInTitle(title),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
// Sphinx's message speaks of categories, which this site does not have.
Documentation.TRANSLATIONS[
  "Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories."
] = "No page contains all of these words. Use fewer words, or other words.";
