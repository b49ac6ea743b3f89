"""Models and data sets of a recipe, from the Hugging Face hub into the folder that all nodes see.

In: the table [assets] of a recipe, a folder, the hub. Out: one folder a repository, whole and checked, or an error that
says what is wrong; beside its files a manifest of sizes and digests. Invariants: a folder appears under its name only
when every file in it has been checked; of several fetchers, on any nodes, one downloads and the others wait.
"""
