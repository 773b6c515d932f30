"""The style sheet of the panel: the colours of the front end's theme, and literal ones where it has none.

A pressed button, one that cannot be pressed and an error differ in shape or words too, never in colour alone.
"""

from __future__ import annotations

TEXT, GROUND = "#111111", "#ffffff"
"""The colours of a front end without a theme, such as the classic notebook; a theme sets both."""

FIRST_PART, SECOND_PART = "#0072b2", "#d55e00"
"""Blue and vermilion of the palette of Okabe and Ito (https://jfly.uni-koeln.de/color), which colour-blind people tell
apart; both stand out from a white and from a black ground by more than 3 to 1, which WCAG 2.2 asks for in 1.4.11."""

STYLE_SHEET = f"""<style>
.openmed-panel.openmed-panel {{
  --openmed-text: var(--jp-ui-font-color0, {TEXT});
  --openmed-ground: var(--jp-layout-color1, {GROUND});
  container: openmed-panel / inline-size; width: auto;
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 0.9rem 2.5rem;
  max-width: 76rem; box-sizing: border-box; margin: 2px; padding: 0.8rem 1rem 1rem; overflow: visible;
  border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 6px;
  color: var(--openmed-text); background: var(--openmed-ground);
}}
.openmed-panel .openmed-style {{display: none;}}
.openmed-panel .openmed-region {{gap: 0.45rem; min-width: 0; margin: 0; overflow: visible;}}
.openmed-panel .openmed-wide {{grid-column: 1 / -1;}}
.openmed-panel .widget-html {{width: auto; max-width: 100%; min-width: 0; height: auto; margin: 0;}}
.openmed-panel .widget-html-content {{min-width: 0; line-height: 1.45; color: var(--openmed-text);}}
.openmed-panel .widget-html:has(> .widget-html-content:empty) {{display: none;}}
.openmed-panel .openmed-nb {{color: inherit; overflow-wrap: break-word;}}
.openmed-panel h3.openmed-heading {{
  margin: 0; font-size: 0.95rem; line-height: 1.4; font-weight: 600; color: inherit;
  border-bottom: 1px solid var(--jp-border-color2, #e0e0e0);
}}
.openmed-panel p.openmed-first {{font-size: 1.3rem; line-height: 1.35; margin: 0 0 0.15rem;}}
.openmed-panel .openmed-nb.tex2jax_ignore table {{margin: 0.1em 0; font-size: 0.8125rem; max-width: 100%;}}
.openmed-panel .openmed-nb.tex2jax_ignore table th, .openmed-panel .openmed-nb.tex2jax_ignore table td {{padding: 0.15em 1em 0.15em 0;}}
.openmed-panel .openmed-nb.tex2jax_ignore thead th {{font-weight: 400; color: var(--openmed-text);}}
.openmed-panel .openmed-nb tbody tr, .openmed-panel .openmed-nb tbody tr:hover {{background: none;}}
.openmed-panel .openmed-devices td:first-of-type {{white-space: nowrap;}}
.openmed-panel .openmed-unseen {{position: absolute; clip-path: inset(50%); white-space: nowrap;}}
.openmed-panel .openmed-nb summary {{width: fit-content; cursor: pointer;}}

.openmed-panel .openmed-controls {{
  display: flex; flex-flow: row wrap; align-items: center; gap: 0.45rem; margin: 0; overflow: visible;
}}
.openmed-panel .openmed-controls:not(:has(button, .openmed-activity)) {{display: none;}}
.openmed-panel .jupyter-button {{
  width: auto; height: auto; min-height: 2rem; margin: 0; padding: 0.2rem 0.75rem; box-sizing: border-box;
  font-size: 0.875rem; line-height: 1.3; white-space: normal; text-overflow: clip; overflow: visible; opacity: 1;
  color: var(--openmed-text); background: var(--jp-layout-color2, #eeeeee);
  border: 1px solid var(--jp-ui-font-color2, #757575); border-radius: 4px; box-shadow: none;
}}
.openmed-panel .jupyter-button.openmed-in-force {{font-weight: 700; border-width: 2px; border-color: var(--openmed-text);}}
.openmed-panel .jupyter-button:hover:enabled {{box-shadow: none; border-color: var(--openmed-text); text-decoration: underline;}}
.openmed-panel .jupyter-button.mod-active {{
  font-weight: 700; color: var(--openmed-ground); background: var(--openmed-text); border: 2px solid var(--openmed-text);
}}
.openmed-panel .jupyter-button:disabled {{
  opacity: 1; color: var(--openmed-text); background: none; border-style: dashed; cursor: not-allowed;
}}
.openmed-panel.openmed-panel *:focus-visible {{outline: 3px solid {FIRST_PART}; outline-offset: 2px;}}
.openmed-panel .widget-checkbox {{width: auto; height: auto; margin: 0; overflow: visible;}}
.openmed-panel .widget-checkbox label, .openmed-panel .widget-checkbox .widget-label-basic {{
  display: flex; align-items: center; gap: 0.4rem; width: auto; height: auto; line-height: 1.3; white-space: normal;
  opacity: 1; color: var(--openmed-text);
}}
.openmed-panel .widget-checkbox input {{margin: 0;}}
.openmed-panel .widget-textarea {{
  display: flex; flex-direction: column; align-items: stretch; width: 100%; height: auto; margin: 0; overflow: visible;
}}
.openmed-panel .widget-textarea .widget-label {{
  width: auto; max-width: none; height: auto; margin: 0 0 0.3rem; text-align: left; line-height: 1.45; color: var(--openmed-text);
}}
.openmed-panel .widget-textarea textarea {{
  width: 100%; box-sizing: border-box; font: inherit; font-size: 0.875rem; line-height: 1.45; color: var(--openmed-text); background: var(--openmed-ground);
  border: 1px solid var(--jp-ui-font-color2, #757575); border-radius: 4px;
}}

.openmed-panel .openmed-activity {{display: flex; align-items: center; gap: 0.5rem;}}
.openmed-panel .openmed-spinner {{
  flex: none; width: 0.9rem; height: 0.9rem; border: 2px solid currentColor; border-right-color: transparent; border-radius: 50%;
  animation: openmed-turn 1s linear infinite;
}}
@keyframes openmed-turn {{to {{transform: rotate(360deg);}}}}
.openmed-panel .openmed-late {{animation: openmed-appear 0s 0.4s both;}}
@keyframes openmed-appear {{from {{opacity: 0;}}}}
@media (prefers-reduced-motion: reduce) {{.openmed-panel .openmed-spinner {{animation: none;}}}}
.openmed-panel .openmed-error {{border: 1px solid {SECOND_PART}; border-left-width: 6px; border-radius: 4px; padding: 0.3rem 0.7rem;}}
.openmed-panel .openmed-said {{border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 4px; padding: 0.3rem 0.7rem;}}

.openmed-panel .openmed-bar {{
  display: flex; height: 0.8rem; width: 11rem; max-width: 100%; margin: 0.25rem 0; overflow: hidden; box-sizing: border-box;
  border: 1px solid var(--jp-ui-font-color2, #757575); border-radius: 3px;
}}
.openmed-panel .openmed-swatch {{
  display: inline-block; width: 0.75rem; height: 0.75rem; margin-right: 0.3rem; vertical-align: -0.08rem; border-radius: 2px;
}}
.openmed-panel .openmed-part-0 {{background: {FIRST_PART};}}
.openmed-panel .openmed-part-1 {{
  background: repeating-linear-gradient(135deg, {SECOND_PART} 0 3px, var(--openmed-ground) 3px 5px);
}}
.openmed-panel .openmed-used {{display: inline-block; margin-right: 0.9rem;}}

@container openmed-panel (max-width: 34rem) {{
  .openmed-panel .openmed-nb table, .openmed-panel .openmed-nb tbody {{display: block;}}
  .openmed-panel .openmed-nb caption:not(.openmed-unseen) {{display: block;}}
  .openmed-panel .openmed-nb thead {{position: absolute; clip-path: inset(50%);}}
  .openmed-panel .openmed-nb tbody tr {{display: flex; flex-flow: row wrap; column-gap: 1rem; padding: 0.3rem 0;}}
  .openmed-panel .openmed-nb tbody th {{flex: 1 1 100%;}}
  .openmed-panel .openmed-nb.tex2jax_ignore table th, .openmed-panel .openmed-nb.tex2jax_ignore table td {{padding: 0;}}
  .openmed-panel .openmed-nb td::before {{content: attr(data-column) ": ";}}
  .openmed-panel .openmed-nb td:empty {{display: none;}}
}}
</style>"""
