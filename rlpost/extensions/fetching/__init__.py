"""Models and data of a recipe: downloaded, or made where they are tiny."""
