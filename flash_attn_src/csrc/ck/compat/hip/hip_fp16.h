/* Stands in where the HIP headers come without hip_fp16.h, as those of the triton package do. ck_tile includes it
 * and uses nothing of it, since its half is the compiler's _Float16 here. Searched last: a real one comes first. */
#pragma once
