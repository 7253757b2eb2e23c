/* letters.h: sends and receives between two ranks. */
#ifndef COLLECTIVED_LETTERS_H
#define COLLECTIVED_LETTERS_H

#include "engine.h"

/* Does what can be done for sends and receives; whether anything was. */
int letters_advance(struct engine *e);
/* Whether something has come since. */
int letters_came(const struct engine *e);
/* Ends what has waited too long; when the next deadline is, ~0: there is none. */
u64 letters_expire(struct engine *e, u64 t);
/* Stops all reads of the value of a send, which does not end well. */
void letters_withdraw(struct engine *e, const struct job *job);
/* Forgets what the engine remembers of letters. */
void letters_close(struct engine *e);

#endif
