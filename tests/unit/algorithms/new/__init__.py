"""Files that tests add to the package."""
