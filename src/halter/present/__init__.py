"""How anything is put into words and tables, the same for every face."""
