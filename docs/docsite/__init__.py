"""The documentation's site: formulas, generated pages, pictures, and the generated parts of README and docs."""
