"""Parts that other libraries load: nothing here is imported unless it is used."""
