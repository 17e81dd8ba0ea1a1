"""Seams to frameworks and tools beside Celery; each imports what it is about, and nothing else imports it."""
