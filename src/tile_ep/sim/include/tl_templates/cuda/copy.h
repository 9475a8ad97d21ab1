#include "sim_waits.h"
