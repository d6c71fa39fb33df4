"""A report: what an analysis says, as a document, and the document as text."""
