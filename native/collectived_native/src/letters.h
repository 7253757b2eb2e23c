/* letters.h: sends and receives between two ranks. */
#ifndef COLLECTIVED_LETTERS_H
#define COLLECTIVED_LETTERS_H

#include "engine.h"

/* Does what can be done for sends and receives; whether anything was. */
int letters_advance(struct engine *e);
/* Whether something has come since. */
int letters_came(struct engine *e);

#endif
