/* Control Flow Guard: an indirect call of the launcher ends the process unless its target is the start of a function.
 *
 * Windows reads the load configuration and puts its own functions into the two pointers. Where it does not, as under
 * Wine, every target is accepted. The linker defines the symbols __guard_... (lld, MSVC's link.exe). */

    .section .00cfg, "dr"
    .balign 8
    .globl __guard_check_icall_fptr, __guard_dispatch_icall_fptr
__guard_check_icall_fptr:
    .quad accept
__guard_dispatch_icall_fptr:
    .quad call_target

    .text
accept:
    ret
call_target:
    jmp *%rax

/* IMAGE_LOAD_CONFIG_DIRECTORY64 up to the counts of the tables; fields without a name here are 0. */
    .section .rdata, "dr"
    .balign 8
    .globl _load_config_used
_load_config_used:
    .long end_of_load_config - _load_config_used /* Size */
    .fill 0x70 - 4
    .quad __guard_check_icall_fptr    /* GuardCFCheckFunctionPointer, at 0x70 */
    .quad __guard_dispatch_icall_fptr /* GuardCFDispatchFunctionPointer */
    .quad __guard_fids_table          /* GuardCFFunctionTable */
    .quad __guard_fids_count          /* GuardCFFunctionCount */
    .long __guard_flags               /* GuardFlags */
    .fill 12                          /* CodeIntegrity */
    .quad __guard_iat_table           /* GuardAddressTakenIatEntryTable */
    .quad __guard_iat_count           /* GuardAddressTakenIatEntryCount */
    .quad 0                           /* GuardLongJumpTargetTable: the launcher has no longjmp */
    .quad 0                           /* GuardLongJumpTargetCount */
end_of_load_config:
