"""How databases of earlier versions come to today's tables; `versions` has one module for each change."""
